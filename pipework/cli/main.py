"""The entry point: parses arguments and runs the command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import pipework
from pipework.cli import check_device, env, models, schedules
from pipework.cli.arguments import Report

_READER_ENDED, _INTERRUPTED = 141, 130  # as shells have it: 128 and the numbers of SIGPIPE and SIGINT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line, which the full usage would hide.
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments, without the program's name; None: those of the process.

    Returns:
        The exit status: 0; 1 if a check did not pass; 2 if arguments are wrong, with one line on the standard error;
        130 after Ctrl-C, 141 if the reader of the output has ended, as `head` does.

    Example:
        >>> main(["draw", "gpipe", "--workers", "2", "--chunks", "1", "--costs", "backward=1"])
        gpipe, 2 workers, 1 micro-batch
        worker 0  0F0  .   .  0B0
        worker 1   .  1F0 1B0  .
        bubble 50.0%, makespan 4, peak memory 1 (in micro-batches of activations of a stage)
        0
    """
    parser: argparse.ArgumentParser = _Parser(
        prog="python -m pipework", description="Pipeline-parallel training for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"pipework {pipework.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in (schedules, models, check_device, env):
        module.add_to(commands)
    try:
        try:
            arguments = parser.parse_args(argv)
            report = Report([parser.format_help()]) if arguments.command is None else arguments.run(arguments)
            print("\n".join(report.lines))
            status = int(report.status)
        except SystemExit as stop:  # --help, --version or a mistake; the message is printed already
            status = int(stop.code or 0)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python writes what is left once more when it exits, and would report the error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_ENDED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (ValueError, OSError, ImportError) as error:
        print(f"{parser.prog} {arguments.command}: error: {error}", file=sys.stderr)
        return 2
