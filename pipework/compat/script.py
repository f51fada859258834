"""Runs a script as the main module, with the adapters installed: in this process and in those that it spawns.

A spawned process imports the main module of its parent by the name in its `__spec__`. Here that is the name of this
module, which then installs the adapters and runs the script.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pipework
from pipework.compat import install

_VARIABLE = "PIPEWORK_COMPAT_SCRIPT"  # of the environment, which spawned processes inherit


def main() -> None:
    """Runs the script that the command line names, like `python script.py ...`."""
    name = sys.argv[1] if len(sys.argv) > 1 else "of that name"
    if not Path(name).is_file():
        sys.stderr.write(
            "usage: python -m pipework.compat script ...\n\nRuns a script written for torch.distributed.pipeline.sync, "
            f"torchgpipe or fairscale.nn.Pipe with pipework in their place. There is no file {name}; in a module, call "
            "pipework.compat.install() before the old imports\n"
        )
        sys.exit(2)
    path = Path(name).absolute()
    del sys.argv[0]
    if not sys.flags.safe_path:  # in safe-path mode Python adds no folder
        sys.path[0] = str(path.resolve().parent)
    home = str(Path(pipework.__file__).resolve().parents[1])
    if home not in sys.path:  # spawned processes must find the package, too, if it was in the current folder
        sys.path.append(home)
    os.environ[_VARIABLE] = str(path)
    module = ModuleType("__main__")
    module.__spec__ = ModuleSpec("pipework.compat.script", None, origin=str(path))
    sys.modules["__main__"] = module
    _run(vars(module))


def _run(namespace: dict[str, Any]) -> None:
    path = os.environ[_VARIABLE]
    install()
    namespace["__file__"] = path
    # Bytes, since the first line may declare an encoding; the __future__ imports of this file are not inherited.
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), namespace)


if __name__ == "__mp_main__":
    _run(globals())
