"""`python -m pipework.compat script.py ...`: runs an old script unchanged."""

from __future__ import annotations

import argparse
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from pipework.compat.installing import install


def main() -> None:
    """Runs the script that the command line names, as `python script.py ...` would."""
    parser = argparse.ArgumentParser(
        prog="python -m pipework.compat",
        description="Runs a script written for torch.distributed.pipeline.sync, torchgpipe or fairscale.nn.Pipe "
        "with pipework in their place.",
    )
    parser.add_argument("script", type=Path, help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    given = parser.parse_args()
    if not given.script.is_file():
        parser.error(f"there is no file {given.script}")
    sys.argv = [str(given.script), *given.arguments]
    sys.path[0] = str(given.script.resolve().parent)
    install()
    run_as_main(given.script)


def run_as_main(script: Path) -> None:
    """Executes a script as the main module, also for the processes that it will spawn.

    A spawned process imports the main module of its parent by the name in its `__spec__`; that of
    `pipework.compat.spawned` lets it install the adapters first.
    """
    module = ModuleType("__main__")
    module.__file__ = str(script)
    module.__spec__ = ModuleSpec("pipework.compat.spawned", None, origin=str(script))
    sys.modules["__main__"] = module
    exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)


if __name__ == "__main__":
    main()
