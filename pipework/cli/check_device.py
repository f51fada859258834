"""`python -m pipework check-device`: whether pipes compute the right bits on this machine's devices."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING

from pipework.cli import env
from pipework.cli.arguments import Report, add_command
from pipework.schedule.draw.units import aligned, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pipework.cli.arguments import Commands
    from pipework.device_check import CheckedPlace


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    text = "check that pipes compute the right bits on this machine's devices"
    more = (
        "Small pipes are trained on each device, and across each ordered pair of devices, and loss, outputs and "
        "gradients are compared with those of the plain model there, bit by bit, while streams are delayed and used "
        "memory is overwritten. The exit status is 0 if all is right, 1 if something is wrong, 2 if an argument is. "
        "Example: python -m pipework check-device --devices 0 1 cpu --seconds 30"
    )
    parser = add_command(commands, "check-device", run, text, more)
    about = "numbers of accelerators, or names such as cuda:0 and cpu (default: all accelerators and the CPU)"
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help=about)
    about = "how long to go on with further cases; each device and link is checked at least once (default 50)"
    parser.add_argument("--seconds", type=_seconds, default=50.0, metavar="S", help=about)


def run(arguments: argparse.Namespace) -> Report:
    """Run the command.

    Raises:
        ValueError: a device cannot be used or is named twice.
        ImportError: PyTorch is not installed.
    """
    from pipework.device_check import check_devices  # imports torch, which the other commands do not need

    devices, start = _devices(arguments.devices), time.perf_counter()
    show = sys.stderr.isatty()
    places = check_devices(
        devices, arguments.seconds, lambda case: print(case, file=sys.stderr, flush=True) if show else None
    )
    wrong = [place.name for place in places if place.failures]
    return Report(_lines(places, wrong, time.perf_counter() - start), int(bool(wrong)))


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


def _lines(places: Sequence[CheckedPlace], wrong: Sequence[str], seconds: float) -> list[str]:
    only_cpu = all(place.source.type == "cpu" for place in places)
    lines = ["No accelerator is checked, only the CPU: this says nothing about GPUs."] if only_cpu else []
    rows = [("device or link", "verdict", "cases")]
    rows += [(each.name, "WRONG" if each.failures else "ok", str(each.cases)) for each in places]
    lines += [*aligned(rows, left={0, 1}), ""]
    for place in places:
        lines += [f"{place.name}: {each}" for each in place.failures]
        if place.inexact:
            lines.append(
                f"{place.name}: in {counted(place.inexact, 'case')} the plain model differed from itself when it was "
                "run twice, so that four times this difference was allowed"
            )
    verdict = f"WRONG on {', '.join(wrong)}" if wrong else "All right"
    lines.append(f"{verdict}: {counted(sum(place.cases for place in places), 'case')} in {seconds:.0f} s.")
    return [*lines, *(["", "Report all of this output:", "", *env.lines()] if wrong else [])]
