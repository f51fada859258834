"""`python -m pipework plan`: the best pipeline for a profile, without the model and its devices."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pipework.cli import arguments as shared
from pipework.cli.report import Report
from pipework.planning.plan_profile import plan_profile
from pipework.planning.profiles.profile import Profile

if TYPE_CHECKING:
    from pipework.cli.draw import Commands

_ENDINGS = (".json", ".csv", ".svg")


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "plan",
        help="find the best pipeline for a profile of a model",
        description="Choose cut, micro-batches, schedule, recomputation and order of devices for a model whose layers "
        "were measured with pipework.planning.profile(model, sample).save(FILE), and say how far from the best that "
        "is.",
        epilog="example: python -m pipework plan profile.json --workers 8 --memory 24GiB --batch 64 -o plan.json -o "
        "plan.svg",
    )
    parser.add_argument("profile", type=Path, metavar="FILE", help="the profile")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--workers", type=shared.count, metavar="N", help="so many devices of the profile's only kind")
    where.add_argument(
        "--devices",
        metavar="A,B,...",
        help="one for each worker: devices of the profile, or kinds of device; 4*NAME stands for four of them",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="the most that a device may hold, such as 24GiB; NAME=SIZE,NAME=SIZE for different ones; workers on one "
        "device share it evenly",
    )
    parser.add_argument("--batch", type=shared.count, metavar="N", help="rows of a mini-batch (default: the profile's)")
    parser.add_argument(
        "--chunks", type=shared.counts, nargs="+", metavar="N,N,...", help="numbers of micro-batches to try"
    )
    parser.add_argument(
        "--optimizer", type=_number, default=2.0, metavar="N",
        help="numbers that the optimizer keeps for each parameter (default 2, as Adam)",
    )  # fmt: skip
    parser.add_argument("--schedules", metavar="A,B,...", help="choose among these schedules only")
    parser.add_argument("--seconds", type=_number, default=30.0, metavar="S", help="time to search (default 30)")
    parser.add_argument(
        "--iterations",
        type=shared.count,
        metavar="N",
        help="try so many candidates instead: always the same plan",
    )
    parser.add_argument(
        "-o", "--output", type=Path, action="append", default=[], metavar="FILE",
        help=f"write the plan ({', '.join(_ENDINGS)}); may be given several times",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print the plan only")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Report:
    """Run the command.

    Raises:
        ValueError: an argument is out of range, the file is no profile, or no plan fits.
        OSError: a file cannot be read or written.
    """
    for path in arguments.output:
        if path.suffix not in _ENDINGS:
            raise ValueError(f"-o {path}: a plan is written as {', '.join(_ENDINGS)}, not as {path.suffix!r}")
        if not path.parent.is_dir():
            raise ValueError(f"-o {path}: there is no folder {path.parent}")
    profile = Profile.load(arguments.profile)
    plan = plan_profile(
        profile,
        _devices(profile, arguments),
        _memory(arguments.memory),
        batch=arguments.batch,
        chunks=None if arguments.chunks is None else list(chain(*arguments.chunks)),
        optimizer=arguments.optimizer,
        schedules=None if arguments.schedules is None else _parts(arguments.schedules),
        seconds=arguments.seconds,
        iterations=arguments.iterations,
        progress=_ignored if arguments.quiet else _tell,
    )
    for path in arguments.output:
        plan.save(path)
    return Report([str(plan)])


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ignored(_: str) -> None: ...


def _devices(profile: Profile, arguments: argparse.Namespace) -> list[str]:
    if arguments.workers is not None:
        if len(profile.kinds) > 1:
            raise ValueError(
                f"the profile has several kinds of device ({', '.join(map(repr, profile.kinds))}): give --devices "
                "instead of --workers"
            )
        return [*profile.kinds] * int(arguments.workers)
    devices: list[str] = []
    for each in _parts(arguments.devices):
        count, star, name = each.partition("*")
        devices += [name.strip()] * int(count) if star and count.strip().isdigit() else [each]
    return devices


def _parts(text: str) -> list[str]:
    """What is between commas."""
    return [each.strip() for each in text.split(",") if each.strip()]


def _number(text: str) -> float:
    try:
        return float(text)  # the planner knows what is out of range
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _memory(text: str | None) -> str | dict[str, float | str] | None:
    if text is None or "=" not in text:
        return text
    pairs = [each.partition("=") for each in _parts(text)]
    if whole := [name for name, equals, _ in pairs if not equals]:
        raise ValueError(f"--memory {text}: {whole[0]!r} has no name: wanted NAME=SIZE,NAME=SIZE, or one SIZE for all")
    return {name.strip(): size.strip() for name, _, size in pairs}
