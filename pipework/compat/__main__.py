"""`python -m pipework.compat script.py ...`: runs an old script unchanged."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipework.compat.script import run_as_main


def main() -> None:
    """Runs the script that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m pipework.compat",
        usage="%(prog)s [-h] script ...",
        description="Runs a script written for torch.distributed.pipeline.sync, torchgpipe or fairscale.nn.Pipe "
        "with pipework in their place.",
    )
    parser.add_argument("script", type=Path, help="the script")
    parser.add_argument("arguments", nargs="*", help="its own arguments")
    if sys.argv[1:2] == ["-m"]:
        parser.error("give the file of a script; in a module, call pipework.compat.install() before the old imports")
    script = parser.parse_args(sys.argv[1:2]).script  # the rest is not ours: argparse would take out a "--"
    if not script.is_file():
        parser.error(f"there is no file {script}")
    run_as_main(script, sys.argv[2:])


if __name__ == "__main__":
    main()
