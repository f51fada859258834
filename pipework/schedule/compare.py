"""Which schedule is the fastest, for given costs and a given memory? All that have a name, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pipework.schedule.build import SCHEDULES, Recipe, build
from pipework.schedule.channels import Channel, check_channel
from pipework.schedule.checks import positive_integer
from pipework.schedule.costs import Costs
from pipework.schedule.memory import each_limit
from pipework.schedule.simulate import Simulation, simulate
from pipework.schedule.validate import Conditions

# GPipe's other name, and what does not train.
_LEFT_OUT: Final = ("fill-drain", "forward-only")


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found.

    Attributes:
        workers: how many there are.
        chunks: how many micro-batches.
        costs: of a worker's whole share.
        memory_limit: the most that a worker may hold; None: anything.
        channel: what carries the transfers.
        fitting: name to simulation of the schedules that can be had, the fastest first.
        others: name to reason of the others.
    """

    workers: int
    chunks: int
    costs: Costs
    memory_limit: float | None
    channel: Channel
    fitting: Mapping[str, Simulation]
    others: Mapping[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """The measures of each schedule that fits, as plain values: for tables, JSON, data frames."""
        return [
            {
                "schedule": name,
                "stages_per_worker": found.schedule.stages // found.schedule.workers,
                "makespan": found.makespan,
                "span": found.span,
                "bubble": found.bubble,
                "span_bubble": found.span_bubble,
                "peak_memory": list(found.peak_memory),
                "exposed_communication": found.exposed_communication,
                "lower_bound": found.lower_bound,
                "gap": found.gap,
            }
            for name, found in self.fitting.items()
        ]


def compare(
    *,
    workers: int,
    chunks: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    stages_per_worker: int | None = None,
    channel: Channel = "unbounded",
    schedules: Mapping[str, Recipe] = SCHEDULES,
) -> Comparison:
    """Simulate all schedules under the same conditions.

    Args:
        workers: how many there are.
        chunks: how many micro-batches.
        costs: times and memory of a worker's whole share of the model, which is divided evenly among its stages (see
            :meth:`Costs.divided`). Sequences have a number for each stage, so only schedules of as many stages fit.
        memory_limit: the most that a worker may hold; None: anything.
        stages_per_worker: for schedules that can have several; None: as many as they usually have.
        channel: what carries the transfers.
        schedules: name to recipe, of which ``"fill-drain"`` (GPipe) and ``"forward-only"`` (which does not train) are
            left out.

    Raises:
        TypeError: a number is not an int, or the limit not a number.
        ValueError: a number is less than 1, an unknown channel, or an impossible limit.

    Example:
        >>> found = compare(workers=4, chunks=8, memory_limit=3)
        >>> list(found.fitting)
        ['v-half', 'v-min']
        >>> found.others["gpipe"]
        'a worker holds 8, more than the limit of 3'
    """
    for name, value in (("workers", workers), ("chunks", chunks)):
        positive_integer(name, value)
    check_channel(channel)
    each_limit(memory_limit, workers)
    costs = Costs() if costs is None else costs
    fitting: dict[str, Simulation] = {}
    others: dict[str, str] = {}
    for name, known in schedules.items():
        if name in _LEFT_OUT:
            continue
        count = stages_per_worker if known.several and stages_per_worker is not None else known.stages_per_worker
        share = costs.divided(count)
        try:
            schedule = build(
                name, workers=workers, chunks=chunks, stages_per_worker=count, costs=share, schedules=schedules
            )
            found = simulate(schedule, share, channel=channel)
        except ValueError as error:
            others[name] = str(error)
            continue
        most = max(found.peak_memory)
        # Sums of fractions are a little off.
        if memory_limit is not None and most > memory_limit * (1 + 1e-9):
            others[name] = f"a worker holds {most:.6g}, more than the limit of {memory_limit:.6g}"
        else:
            fitting[name] = replace(found, conditions=Conditions(channel=channel, memory_limit=memory_limit))
    best = sorted(fitting, key=lambda name: (fitting[name].makespan, max(fitting[name].peak_memory)))
    return Comparison(workers, chunks, costs, memory_limit, channel, {name: fitting[name] for name in best}, others)
