"""What a process that an old script has spawned imports in place of the script; see `pipework.compat.__main__`.

Imported in any other way it does nothing.
"""

import sys
from pathlib import Path

from pipework.compat.installing import install

if __name__ == "__mp_main__":
    install()
    __file__ = sys.argv[0]
    exec(compile(Path(__file__).read_bytes(), __file__, "exec"), globals())
