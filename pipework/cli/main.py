"""The entry point: parses arguments and runs the command, each of which has its own file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Final, NoReturn

from pipework.cli import check, check_device, compare, convert, draw, env, plan
from pipework.cli.report import Report
from pipework.schedule.argument_checks import unknown_name

_COMMANDS: Final[Mapping[str, ModuleType]] = MappingProxyType(
    {
        "draw": draw,
        "compare": compare,
        "plan": plan,
        "check": check,
        "convert": convert,
        "check-device": check_device,
        "env": env,
    }
)

_READER_ENDED: Final = 141  # as shells have it: 128 and the number of SIGPIPE


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
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python writes what is left once more when it exits, and would report the error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_ENDED
    return status


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    command = next((word for word in words if not word.startswith("-")), None)
    try:
        if command is not None and command not in _COMMANDS:
            parser.error(unknown_name("command", command, _COMMANDS))
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            parser.prog += f" {command}" if command else ""  # whose help has its options
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as stop:  # --help, --version or a mistake; the message is printed already
        return int(stop.code or 0)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        report: Report = arguments.run(arguments)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        print(f"{parser.prog} {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report.lines))
    return report.status


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="python -m pipework", description="Pipeline-parallel training for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"pipework {env.version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in _COMMANDS.values():
        command.add_to(commands)
    return parser
