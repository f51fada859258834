"""Simulation: the timeline that a schedule leads to, if its actions cost what one says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipework.schedule.action import KINDS
from pipework.schedule.analysis import memory
from pipework.schedule.analysis.bounds import Bounds, lower_bounds
from pipework.schedule.analysis.channels import Channel
from pipework.schedule.analysis.critical_path import critical_path
from pipework.schedule.analysis.events import Run
from pipework.schedule.analysis.validate import Conditions, examine, raise_first
from pipework.schedule.costs import Costs, checked
from pipework.schedule.draw.svg import svg
from pipework.schedule.schedule import Schedule, checked_schedule
from pipework.schedule.timeline import Interval, Timeline


@dataclass(frozen=True)
class Simulation:
    """A predicted timeline and its measures.

    Two makespans are worth knowing: ``makespan`` is what a step costs if workers meet at its end, as for the clipping
    of gradients; ``span`` is what it costs if they do not.

    Attributes:
        schedule: what was simulated.
        costs: with which costs.
        timeline: what came out, in the unit of the costs: start and end of every action, memory, and transfers if the
            schedule has them or the channel asks for them.
        conditions: under which: where the loss is, what channels there are, how much memory.
        execution: what was executed, which has transfers if channels ask for them, and how it went.
    """

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    conditions: Conditions
    execution: tuple[Schedule, Run] = field(repr=False)

    def _repr_svg_(self) -> str:
        return svg(self.timeline)

    def __repr__(self) -> str:
        return f"Simulation({self.schedule.title}: makespan {self.makespan:.4g}, bubble {100 * self.bubble:.1f} %)"

    @property
    def makespan(self) -> float:
        """End of the last action minus start of the first, over all workers."""
        return self.timeline.makespan

    @property
    def span(self) -> float:
        """The longest busy window of a worker."""
        return self.timeline.span

    @property
    def bubble(self) -> float:
        """The idle share of workers x makespan, from 0 to 1."""
        return self.timeline.bubble

    @property
    def span_bubble(self) -> float:
        """The idle share of workers x span, from 0 to 1."""
        return self.timeline.span_bubble

    @property
    def busy(self) -> tuple[float, ...]:
        """The time in which each worker computes."""
        return tuple(map(self.timeline.busy, range(self.timeline.workers)))

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most memory that each worker's activations hold."""
        return tuple(map(self.timeline.peak_memory, range(self.timeline.workers)))

    @property
    def stage_peak_memory(self) -> tuple[float, ...]:
        """The most memory that the activations of each stage hold, by themselves.

        The stages of one worker need not reach that at the same moment.
        """
        return memory.stage_peaks(self.schedule, self.costs.spread(self.schedule.stages, len(self.schedule.skips)))

    @cached_property
    def exposed_communication(self) -> float:
        """How much longer it takes than if all transfers and reductions took no time."""
        free = replace(self.costs, transfer=0.0, skip_transfer=0.0, reduce_gradient=0.0)
        return self.makespan - simulate(self.schedule, free, loss_outside=self.conditions.loss_outside).makespan

    @cached_property
    def bounds(self) -> Bounds:
        """What any schedule takes at the least, with these costs, this placement, and this much memory.

        Memory is the limit that was given, or if there was none, what each worker holds here at most. A backward may be
        split if this schedule splits any.
        """
        kinds = Counter((action.kind, action.stage) for order in self.schedule.orders for action in order)
        stages = range(self.schedule.stages)
        limit = self.conditions.memory_limit
        return lower_bounds(
            self.schedule.placement,
            self.schedule.micro_batches,
            replace(self.costs, skip_transfer=0.0),
            memory_limit=self.peak_memory if limit is None else limit,
            split=any(kinds["I", stage] for stage in stages),
            inference=self.schedule.inference,
            recomputed=[kinds["R", stage] for stage in stages],
        )

    @property
    def lower_bound(self) -> float:
        """The makespan that no schedule beats; see :attr:`bounds`."""
        return self.bounds.makespan

    @property
    def gap(self) -> float:
        """By which share the makespan is above its lower bound; 0 if no schedule can be faster."""
        return max(0.0, self.makespan / self.lower_bound - 1.0) if self.lower_bound else 0.0

    @cached_property
    def critical_path(self) -> tuple[Interval, ...]:
        """Actions of which each starts because the one before it has ended, from the first action to the end.

        To make the step shorter, one of them has to become shorter, or to be moved. Between actions of two workers lies
        the transfer, as an interval of its own if the timeline has transfers; it begins when the later of its two sides
        has been posted.
        """
        times = {each.action: each for each in (*self.timeline.intervals, *self.timeline.communication)}
        return tuple(times[action] for action in critical_path(*self.execution))


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    loss_outside: bool = False,
    channel: Channel = "unbounded",
    memory_limit: float | Sequence[float] | None = None,
) -> Simulation:
    """Predict when each action runs and how much memory its worker holds.

    Workers run their orders, each action as early as its data allows; a boundary, or a skip, between two workers takes
    ``costs.transfer`` (``costs.skip_transfer``) and keeps neither of them busy. Reductions of gradients run beside the
    computation, one after the other on each worker.

    The time that it takes grows with the number of actions, transfers included.

    Args:
        schedule: a valid one.
        costs: unit costs if None, see :class:`Costs`.
        loss_outside: the loss is computed outside of the pipe: no backward (or recompute) starts before the forwards of
            all workers have ended.
        channel: what carries the transfers: see :mod:`pipework.schedule.analysis.channels`. Other than ``"unbounded"``,
            a schedule without transfers gets them first, as :func:`with_communication` adds them.
        memory_limit: the most that a worker may hold, or a number for each worker; None: anything.

    Raises:
        ScheduleError: the schedule cannot be executed, or not within the limit.
        TypeError: no schedule, no costs, or a limit that is not a number.
        ValueError: an unknown channel, an impossible limit, or costs for another number of stages.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> result = simulate(fill_drain(4, 8))
        >>> result.makespan, round(100 * result.bubble, 1), max(result.peak_memory)
        (33.0, 27.3, 8.0)
    """
    costs = checked(costs)
    conditions = Conditions(loss_outside, channel, memory_limit)
    spread = costs.spread(checked_schedule(schedule).stages, len(schedule.skips))
    violations, executed, ended = examine(schedule, spread, conditions)
    raise_first(schedule.name, violations)
    assert ended is not None  # what is not worth a run has violations
    computing: list[Interval] = []
    communicating: list[Interval] = []
    for worker, (order, row, amounts) in enumerate(
        zip(executed.orders, ended.times, memory.rows(executed, spread), strict=True)
    ):
        for action, (start, end), (most, held) in zip(order, row, amounts, strict=True):
            if action.kind in KINDS:
                computing.append(Interval(worker, action, start, end, most, 0, held))
            elif action.peer >= 0 or action.kind == "REDUCE_GRAD":
                communicating.append(Interval(worker, action, start, end))
    line = Timeline(tuple(computing), schedule.workers, title=schedule.title, communication=tuple(communicating))
    return Simulation(schedule, costs, line.normalised(), conditions, (executed, ended))
