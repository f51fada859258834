"""Simulation: the timeline that a schedule leads to, if its actions cost what one says."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from pipework.schedule.action import Action
from pipework.schedule.costs import Costs, StageCosts
from pipework.schedule.edges import recomputed
from pipework.schedule.schedule import Schedule
from pipework.schedule.timeline import Interval, Timeline
from pipework.schedule.validate import examine, raise_first


@dataclass(frozen=True)
class Simulation:
    """A predicted timeline and its measures.

    Two makespans are worth knowing: ``makespan`` is what a step costs if workers meet at its end, as for the clipping
    of gradients; ``span`` is what it costs if they do not.

    Attributes:
        schedule: what was simulated.
        costs: with which costs.
        timeline: what came out, in the unit of the costs.
    """

    schedule: Schedule
    costs: Costs
    timeline: Timeline

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
        """The time in which each worker works."""
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
        costs, checkpointed = self.costs.spread(self.schedule.stages), recomputed(self.schedule)
        own: list[list[Action]] = [[] for _ in self.schedule.placement]
        for order in self.schedule.orders:
            for action in order:
                own[action.stage].append(action)
        held = (_held(order, costs, checkpointed, inference=self.schedule.inference) for order in own)
        return tuple(max((most for most, _ in each), default=0.0) for each in held)


def simulate(schedule: Schedule, costs: Costs | None = None, *, loss_outside: bool = False) -> Simulation:
    """Predict when each action runs and how much memory its worker holds.

    Workers run their orders, each action as early as its data allows; a boundary between two workers takes
    ``costs.transfer`` and keeps neither of them busy.

    Args:
        schedule: a valid one.
        costs: unit costs if None, see :class:`Costs`.
        loss_outside: the loss is computed outside of the pipe: no backward (or recompute) starts before the forwards of
            all workers have ended.

    Raises:
        ScheduleError: the schedule cannot be executed.
        ValueError: the costs are for another number of stages.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> result = simulate(fill_drain(4, 8))
        >>> result.makespan, round(100 * result.bubble, 1), max(result.peak_memory)
        (33.0, 27.3, 8.0)
    """
    costs = Costs() if costs is None else costs
    spread = costs.spread(schedule.stages)
    violations, ended = examine(schedule, spread, loss_outside=loss_outside)
    raise_first(schedule.name, violations)
    times = ended.times if ended else ()
    memory = _memory(schedule, spread)
    intervals = tuple(
        Interval(worker, action, start, end, most, held=held)
        for worker, order in enumerate(schedule.orders)
        for action, (start, end), (most, held) in zip(order, times[worker], memory[worker], strict=True)
    )
    return Simulation(schedule, costs, Timeline(intervals, schedule.workers, title=schedule.title).normalised())


def _memory(schedule: Schedule, costs: StageCosts) -> list[list[tuple[float, float]]]:
    """The most that each worker holds during each of its actions, and what the micro-batch holds afterwards."""
    checkpointed = recomputed(schedule)
    return [_held(order, costs, checkpointed, inference=schedule.inference) for order in schedule.orders]


def _held(
    order: Iterable[Action], costs: StageCosts, checkpointed: Set[tuple[int, int]], *, inference: bool
) -> list[tuple[float, float]]:
    """The same for the actions of one worker, or of one stage alone."""
    held: dict[tuple[int, int], float] = {}
    total = 0.0
    row = []
    for kind, stage, micro_batch, _ in order:
        key = (stage, micro_batch)
        most = total
        if kind in ("F", "R"):
            before = held.get(key, 0.0)
            small = kind == "F" and key in checkpointed
            held[key] = costs.checkpoint_activation[stage] if small else costs.activation[stage]
            # A first pass is computed with its graph, which it drops at its end.
            most = total - before + max(held[key], costs.activation[stage])
            total += held[key] - before
        if kind in ("B", "W") or inference:  # without a graph, activations do not outlive the forward
            total -= held.pop(key)
            # Sums of fractions drift; a worker that holds nothing holds nothing.
            total = total if held else 0.0
        row.append((most, held.get(key, 0.0)))
    return row
