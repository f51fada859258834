"""`python -m pipework compare`: a table of all schedules, the fastest first."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipework.cli import arguments as shared
from pipework.cli.report import Report
from pipework.schedule import Comparison, compare

if TYPE_CHECKING:
    from pipework.cli.draw import Commands


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "compare",
        help="compare all schedules for given costs and memory",
        description="Simulate all schedules with the same costs and list those that fit, the fastest first. "
        "Times and memory are those of a worker's whole share of the model, for any number of stages.",
        epilog="example: python -m pipework compare --workers 8 --chunks 32 --memory 5 --costs F=1,I=1.1,W=0.7,c=0.05",
    )
    parser.add_argument("--workers", type=shared.count, required=True, metavar="N", help="number of workers")
    parser.add_argument("--chunks", type=shared.count, required=True, metavar="N", help="number of micro-batches")
    parser.add_argument(
        "--memory",
        type=shared.limit,
        metavar="M",
        help="the most memory that a worker may hold, in the unit of the activations: by default, in micro-batches of "
        "a worker's whole share",
    )
    shared.add_costs(parser)
    parser.add_argument(
        "--stages-per-worker", type=shared.count, metavar="N", help="for schedules that support several (default 2)"
    )
    shared.add_channel(parser, default="unbounded")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Report:
    """Run the command.

    Raises:
        ValueError: an argument is out of range.
    """
    found = compare(
        workers=arguments.workers,
        chunks=arguments.chunks,
        costs=arguments.costs,
        memory_limit=arguments.memory,
        stages_per_worker=arguments.stages_per_worker,
        channel=arguments.channel,
    )
    return Report([_json(found) if arguments.json else str(found)])


def _json(found: Comparison) -> str:
    content = {
        "workers": found.workers,
        "chunks": found.chunks,
        "costs": asdict(found.costs),
        "memory_limit": found.memory_limit,
        "channel": found.channel,
        "schedules": found.rows(),
        "others": dict(found.others),
        "of_other_stages": dict(found.of_other_stages),
    }
    return json.dumps(content, indent=2)
