"""`python -m pipework check-device`: whether pipes compute the right bits on this machine's devices."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pipework.cli import env
from pipework.cli.arguments import Report, add_command
from pipework.schedule.draw.units import aligned, counted

if TYPE_CHECKING:
    import torch

    from pipework.cli.arguments import Commands
    from pipework.device_check import CheckedPlace, Findings

_SHOWN: Final = 3  # failures of one device or link
_INTERRUPTED: Final = 130  # as shells have it


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    text = "check that pipes compute the right bits on this machine's devices"
    more = (
        "Small pipes are trained on each device, and across each ordered pair of devices, and loss, outputs and "
        "gradients are compared with those of the plain model there, bit by bit, while streams are delayed and used "
        "memory is overwritten. The exit status is 0 if all is right, 1 if something is wrong, 2 if an argument is, "
        "and 130 after Ctrl-C. Example: python -m pipework check-device --devices 0 1 cpu --seconds 30"
    )
    parser = add_command(commands, "check-device", run, text, more)
    about = "numbers of accelerators, or names such as cuda:0 and cpu (default: all accelerators and the CPU)"
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help=about)
    about = "how long to go on with further cases; each device and link is checked at least once (default 50)"
    parser.add_argument("--seconds", type=_seconds, default=50.0, metavar="S", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> Report:
    """Run the command.

    Raises:
        ValueError: a device cannot be used or is named twice.
        ImportError: PyTorch is not installed.
    """
    from pipework.device_check import check_devices  # imports torch, which the other commands do not need

    devices = _devices(arguments.devices)
    progress = _progress()
    findings = check_devices(devices, arguments.seconds, progress)
    progress("")
    status = _INTERRUPTED if findings.interrupted else int(not findings.all_right)
    if arguments.json:
        return Report([json.dumps({**findings.as_json(), "env": env.facts()}, indent=2)], status)
    return Report(_lines(findings), status)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a time: wanted a number of seconds of at least 0")


def _devices(names: list[str] | None) -> list[torch.device]:
    import torch

    from pipework.assignment.partition import Machine, usable_device

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


def _progress() -> Callable[[str], None]:
    """Shows on a terminal what is being checked, in one line that is overwritten."""
    if not sys.stderr.isatty():
        return lambda text: None
    width = shutil.get_terminal_size().columns - 1
    return lambda text: print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)


def _lines(findings: Findings) -> list[str]:
    only_cpu = all(place.source.type == "cpu" for place in findings.places)
    lines = ["No accelerator is checked, only the CPU: this says nothing about GPUs."] if only_cpu else []
    rows = [("device or link", "verdict", "cases")]
    rows += [(each.name, each.verdict, str(each.cases)) for each in findings.places]
    lines += [*aligned(rows, left={0, 1}), ""]
    for place in findings.places:
        lines += _notes(place)
    cases = f"{counted(sum(place.cases for place in findings.places), 'case')} in {findings.seconds:.0f} s"
    wrong = [place.name for place in findings.places if place.failures]
    text = f"WRONG on {', '.join(wrong)}" if wrong else "All right" if findings.all_right else "Nothing wrong so far"
    interrupted = "Interrupted: this is what was found so far. " if findings.interrupted else ""
    lines.append(f"{interrupted}{text}: {cases}.")
    return [*lines, *(["", "Report all of this output:", "", *env.lines()] if wrong else [])]


def _notes(place: CheckedPlace) -> list[str]:
    lines = [f"{place.name}: {each}" for each in place.failures[:_SHOWN]]
    if len(place.failures) > _SHOWN:
        lines.append(f"{place.name}: and {counted(len(place.failures) - _SHOWN, 'failure')} more (--json has all)")
    if place.inexact:
        lines.append(
            f"{place.name}: in {counted(place.inexact, 'case')} the plain model differed from itself when it was run "
            "twice, so that four times this difference was allowed"
        )
    return lines
