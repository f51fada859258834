"""`python -m pipework check`: whether the schedule in a file can be executed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipework.cli import arguments as shared
from pipework.cli.report import Report
from pipework.schedule import Costs, ScheduleError, simulate, validate
from pipework.schedule.analysis.rules import ascending
from pipework.schedule.draw.units import counted, memory_text, time_text

if TYPE_CHECKING:
    from pipework.cli.draw import Commands


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "check",
        help="check whether the schedule in a file can be executed",
        description="Check whether the schedule in a file can be executed, and print the reason if not. The exit "
        "status is 0 if it can, 1 if not, and 2 if the file holds no schedule.",
        epilog="example: python -m pipework check schedule.csv --channel pair --memory 5",
    )
    parser.add_argument("file", type=Path, help=f"a schedule ({shared.FILES}); CSV in either form of PyTorch")
    shared.add_channel(parser, default="unbounded")
    parser.add_argument(
        "--memory",
        type=shared.limit,
        metavar="M",
        help="the most memory that a worker may hold, in the unit of activations",
    )
    shared.add_costs(parser)
    parser.add_argument("--all", action="store_true", help="list all violations, not only the first")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Report:
    """Run the command.

    Raises:
        ValueError: the file cannot be read or holds no schedule, or an argument is out of range.
    """
    schedule = shared.read_schedule(arguments.file)
    costs = arguments.costs.placed(schedule.placement)
    sizes = {"worker": schedule.workers, "stage": schedule.stages, "micro-batch": schedule.micro_batches}
    sizes["action"] = sum(map(len, schedule.orders))
    size = ", ".join(counted(number, what) for what, number in sizes.items())
    try:
        result = simulate(schedule, costs, channel=arguments.channel, memory_limit=arguments.memory)
    except ScheduleError:
        found = validate(schedule, costs, channel=arguments.channel, memory_limit=arguments.memory)
        shown = found.violations if arguments.all else found.violations[:1]
        more = len(found.violations) - len(shown)
        lines = [f"{arguments.file}: cannot be executed ({size})", *(f"  {each.message}" for each in shown)]
        return Report([*lines, f"  and {more} more: --all lists them"] if more else lines, status=1)
    lines = [f"{arguments.file}: can be executed ({size})"]
    if not ascending(schedule):
        lines.append(
            "  but gradients are not formed in the order of micro-batches, so that their sum is not bitwise equal to "
            "that of a plain loop; a Pipe refuses it"
        )
    lines.append(
        f"  bubble {result.bubble:.1%}, makespan {time_text(result.makespan, '')}, "
        f"peak memory {memory_text(max(result.peak_memory), '')}"
    )
    if arguments.costs == Costs():
        lines.append(f"  for the default costs, {shared.DEFAULT_COSTS}; give those of your model with --costs")
    return Report(lines)
