"""The command line: `python -m pipework draw ..`, `python -m pipework env`."""

from pipework.cli.main import main

__all__ = ["main"]
