"""A comparison of all named schedules for given costs and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from pipework.schedule.analysis.channels import Channel, check_channel
from pipework.schedule.analysis.memory import SLACK, each_limit
from pipework.schedule.analysis.simulate import Simulation, simulate
from pipework.schedule.analysis.validate import ValidationOptions
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.costs import Costs, checked_without_skips
from pipework.schedule.draw.units import aligned
from pipework.schedule.registry import SCHEDULES, ScheduleSpec, build

# GPipe's other name, and the schedule for inference.
_LEFT_OUT: Final = ("fill-drain", "forward-only")

_HEAD: Final = ("schedule", "stages", "makespan", "bubble", "span", "span bubble", "memory", "transfers", "to bound")
_LEGEND: Final = (
    "stages: per worker; makespan: time from the first start to the last end of all workers; bubble: idle share",
    "of it; span: the longest time from a worker's first start to its last end; span bubble: idle share of it;",
    "memory: highest peak of a worker; transfers: time that they add to the makespan; to bound: excess of the",
    "makespan over its lower bound, which no schedule of this placement and memory beats",
    "left out: recomputation, reduction of gradients, the optimizer's step, costs of splitting beyond I and W",
)


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`; `print` shows it as a table.

    Attributes:
        workers: number of workers.
        chunks: number of micro-batches.
        costs: of a worker's whole share.
        memory_limit: the most memory that a worker may hold, or a number for each worker; None: no limit.
        channel: the transport of transfers.
        fitting: name to simulation of the schedules that fit, the fastest first.
        others: name to reason of the schedules that need too much memory, cannot be executed, do not have as many
            stages as the costs, or do not support the number of stages per worker that was asked for.
    """

    workers: int
    chunks: int
    costs: Costs
    memory_limit: float | Sequence[float] | None
    channel: Channel
    fitting: Mapping[str, Simulation]
    others: Mapping[str, str]

    def __repr__(self) -> str:
        best = next((f", {name!r} the fastest" for name in self.fitting), "")
        return (
            f"Comparison(workers={self.workers}, chunks={self.chunks}: {len(self.fitting)} schedules fit{best}; "
            f"{len(self.others)} do not)"
        )

    def __str__(self) -> str:
        rows = [_cells(*each) for each in self.fitting.items()]
        lines = [*aligned([_HEAD, *rows], left={0}), "", *_LEGEND] if rows else ["no schedule fits"]
        if self.others:
            lines += ["", "do not fit:", *aligned(list(self.others.items()), left={0, 1})]
        return "\n".join(line.rstrip() for line in lines)


def compare(
    *,
    workers: int,
    chunks: int,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
    stages_per_worker: int | None = None,
    channel: Channel = "unbounded",
    schedules: Mapping[str, ScheduleSpec] = SCHEDULES,
) -> Comparison:
    """Simulate all schedules with the same costs and memory.

    Args:
        workers: number of workers.
        chunks: number of micro-batches.
        costs: times and memory of a worker's whole share of the model, which is divided evenly among its stages.
            Sequences have a number for each worker (of transfers, for each pair of adjacent workers), which is spread
            over the worker's stages by :meth:`Costs.placed`. Or they have a number for each stage; then only schedules
            with as many stages are compared.
        memory_limit: the most memory that a worker may hold, or a number for each worker; None: no limit.
        stages_per_worker: for schedules that support several; None: their defaults.
        channel: the transport of transfers.
        schedules: name to spec; ``"fill-drain"`` (another name of GPipe) and ``"forward-only"`` (for inference) are
            left out.

    Raises:
        TypeError: a number is not an int, a limit is no number, or `costs` is no :class:`Costs`.
        ValueError: a number is less than 1, the channel is unknown, a limit is out of range, or sequences of costs have
            the length for no schedule.

    Example:
        >>> found = compare(workers=4, chunks=8, memory_limit=3)
        >>> list(found.fitting)
        ['v-half', 'v-min']
        >>> found.others["gpipe"]
        'worker 0 holds 8, more than its limit of 3'
    """
    positive_integers(workers=workers, chunks=chunks)
    if stages_per_worker is not None:
        positive_integers(stages_per_worker=stages_per_worker)
    check_channel(channel)
    limits = each_limit(memory_limit, workers)
    costs = checked_without_skips(costs)
    fitting: dict[str, Simulation] = {}
    others: dict[str, str] = {}
    built = False
    for name, spec in schedules.items():
        if name in _LEFT_OUT:
            continue
        count = stages_per_worker if spec.any_stages_per_worker else None
        try:
            schedule = build(
                name, workers=workers, chunks=chunks, stages_per_worker=count, costs=costs.placed, schedules=schedules
            )
            built = True
            found = simulate(schedule, costs.placed(schedule.placement), channel=channel)
        except ValueError as error:
            others[name] = str(error)
            continue
        over = [
            f"worker {worker} holds {peak:.6g}, more than its limit of {limit:.6g}"
            for worker, (peak, limit) in enumerate(zip(found.peak_memory, limits, strict=True))
            if peak > limit * SLACK
        ]
        if over:
            others[name] = over[0]
        else:
            fitting[name] = replace(found, options=ValidationOptions(channel=channel, memory_limit=memory_limit))
    if others and not built:
        name, reason = next(iter(others.items()))
        raise ValueError(
            f"no schedule has as many stages: {reason} (for {name!r}); give sequences of costs one number for each of "
            f"the {workers} workers, or one for each stage of a schedule"
        )
    best = sorted(fitting, key=lambda name: (fitting[name].makespan, max(fitting[name].peak_memory)))
    ranked = MappingProxyType({name: fitting[name] for name in best})
    return Comparison(workers, chunks, costs, memory_limit, channel, ranked, MappingProxyType(others))


def _cells(name: str, found: Simulation) -> tuple[str, ...]:
    """The cells of a row of the table."""
    return (
        name,
        f"{found.schedule.stages // found.schedule.workers}",
        f"{found.makespan:.6g}",
        f"{found.bubble:.1%}",
        f"{found.span:.6g}",
        f"{found.span_bubble:.1%}",
        f"{max(found.peak_memory):.4g}",
        f"{found.exposed_communication:.4g}",
        f"{found.gap:.1%}",
    )
