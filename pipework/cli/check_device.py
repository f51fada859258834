"""`python -m pipework check-device`: whether pipes compute the right bits on this machine's devices."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from pipework.cli import env
from pipework.cli.report import Report
from pipework.schedule.draw.aligned import aligned
from pipework.schedule.draw.units import counted

if TYPE_CHECKING:
    import torch

    from pipework.cli.draw import Commands
    from pipework.device_check import CheckedPlace, Findings

_SHOWN: Final = 3  # failures of one device or link
_INTERRUPTED: Final = 130  # as shells have it


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "check-device",
        help="check that pipes compute the right bits on this machine's devices",
        description="Train small pipes on each device, and across each ordered pair of devices, and compare loss, "
        "outputs and gradients with the plain model there, bit by bit, while streams are delayed and used memory is "
        "overwritten. Copies are timed. The exit status is 0 if all is right, 1 if something is wrong, 2 if an "
        "argument is, and 130 after Ctrl-C.",
        epilog="example: python -m pipework check-device --devices 0 1 cpu --seconds 30",
    )
    parser.add_argument(
        "--devices",
        nargs="+",
        metavar="DEVICE",
        help="numbers of accelerators, or names such as cuda:0 and cpu (default: all accelerators and the CPU)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=50.0,
        metavar="S",
        help="how long to go on with further cases; each device and link is checked at least once (default 50)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Report:
    """Run the command.

    Raises:
        ValueError: a device cannot be used or is named twice.
        ImportError: PyTorch is not installed.
    """
    from pipework.device_check import check_devices  # imports torch, which the other commands do not need

    devices = _devices(arguments.devices)
    with _progress() as progress:
        findings = check_devices(devices, arguments.seconds, progress)
    status = _INTERRUPTED if findings.interrupted else 0 if findings.all_right else 1
    if arguments.json:
        return Report([json.dumps({**findings.as_json(), "env": env.facts()}, indent=2)], status)
    return Report(_lines(findings, any(device.type != "cpu" for device in devices)), status)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: wanted a number of seconds of at least 0")
    return value


def _devices(names: list[str] | None) -> list[torch.device]:
    import torch

    from pipework.assignment.devices import Machine, usable_device

    machine = Machine.here()
    if names is None:
        return [*machine.accelerators, torch.device("cpu")]
    devices = [usable_device(int(name) if name.isdecimal() else name, "--devices", machine) for name in names]
    for device in devices:
        if device.type == "meta":
            raise ValueError("--devices has 'meta', where nothing is computed: leave it out")
        if devices.count(device) > 1:
            raise ValueError(f"--devices has {str(device)!r} twice: name each device once")
    return devices


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is being checked, in one line that is overwritten."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    start = time.perf_counter()
    width = shutil.get_terminal_size().columns - 1

    def show(text: str) -> None:
        line = f"{time.perf_counter() - start:3.0f} s  {text}"
        print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)

    yield show
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _lines(findings: Findings, accelerators: bool) -> list[str]:
    lines = [] if accelerators else ["No accelerator is checked, only the CPU: this says nothing about GPUs."]
    for what in ("device", "link"):
        rows = [_row(place) for place in findings.places if place.is_device == (what == "device")]
        if not rows:
            continue
        table = aligned([(what, "verdict", "cases", "copies: speed of 64 MiB, time of 1 KiB"), *rows], left={0, 1, 3})
        lines += [*map(str.rstrip, table), ""]
    for place in findings.places:
        lines += _notes(place)
    lines.append(_conclusion(findings))
    if any(place.failures for place in findings.places):
        lines += ["", "Report all of this output:", "", *env.lines()]
    return lines


def _row(place: CheckedPlace) -> tuple[str, str, str, str]:
    verdict = place.verdict.upper() if place.failures else place.verdict
    return place.name, verdict, str(place.cases), "not measured" if place.speed is None else str(place.speed)


def _notes(place: CheckedPlace) -> list[str]:
    lines = [f"{place.name}: left out: {each}" for each in place.left_out]
    if place.inexact:
        lines.append(
            f"{place.name}: in {counted(place.inexact, 'case')} the plain model differed from itself when it was run "
            "twice, so that a relative difference of 1e-4 (with autocast 5e-2) was allowed"
        )
    for failure in place.failures[:_SHOWN]:
        lines += [f"{place.name}: {failure.case} (seed {failure.seed})", f"    {failure.text}"]
    hidden = len(place.failures) - _SHOWN
    return [*lines, *([f"{place.name}: and {counted(hidden, 'failure')} more (--json has all)"] if hidden > 0 else [])]


def _conclusion(findings: Findings) -> str:
    cases = f"{counted(sum(place.cases for place in findings.places), 'case')} in {findings.seconds:.0f} s"
    wrong = [place.name for place in findings.places if place.failures]
    text = f"WRONG on {', '.join(wrong)}" if wrong else "All right" if findings.all_right else "Nothing wrong so far"
    return f"{'Interrupted: this is what was found so far. ' if findings.interrupted else ''}{text}: {cases}."
