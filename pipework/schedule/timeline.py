"""A timeline: the times of all actions, whether predicted or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from pipework.schedule.action import Action
from pipework.schedule.kinds import KINDS, Kinds


class Interval(NamedTuple):
    """One action on one worker.

    A plain tuple, because a timeline may have hundreds of thousands of them.

    Attributes:
        worker: number of the worker.
        action: the action.
        start: its start, in the timeline's unit of time.
        end: its end.
        memory: the peak memory of the worker's activations during the action, in the timeline's memory unit. By
            convention a worker allocates at the start of an action and frees at its end.
        step: the training step, for timelines of several steps.
        held: the memory of the action's micro-batch on its stage after the action, in the timeline's memory unit.
        sent: the size of the values that the action sends to other stages, in the same unit; 0 if unknown.
    """

    worker: int
    action: Action
    start: float
    end: float
    memory: float = 0.0
    step: int = 0
    held: float = 0.0
    sent: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """Intervals of all workers, and measures of them.

    Attributes:
        intervals: in any order; those of one worker do not overlap.
        workers: number of workers, including those without an interval.
        unit: of time: ``""`` for units of cost, ``"s"`` for seconds.
        memory_unit: ``""`` for units of cost, ``"bytes"`` for bytes, or a plural noun such as ``"micro-batches"``.
        title: for pictures.
        communication: the intervals of communication, if known: one for each ``SEND`` on the sending worker, for each
            ``RECV`` on the receiving worker, and for each ``REDUCE_GRAD``, ``UNSHARD``, ``O`` and ``L``. They overlap
            with the computation and with each other.
        table: the kinds of actions that there are.

    Raises:
        ValueError: there is no worker, the worker of an interval does not exist, or an interval ends before it starts.

    Example:
        >>> line = Timeline((Interval(0, Action("F", 0, 0), 0, 3), Interval(1, Action("F", 1, 0), 3, 4)), workers=2)
        >>> line.makespan, line.span, line.bubble
        (4, 3, 0.5)
    """

    intervals: tuple[Interval, ...]
    workers: int
    unit: str = ""
    memory_unit: str = ""
    title: str = ""
    communication: tuple[Interval, ...] = field(default=(), repr=False)
    table: Kinds = field(default=KINDS, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "intervals", tuple(self.intervals))
        object.__setattr__(self, "communication", tuple(self.communication))
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}: a timeline has at least one worker")
        workers = range(self.workers)
        for interval in chain(self.intervals, self.communication):
            if interval[0] not in workers:
                raise ValueError(f"{interval}: the timeline has the workers 0 to {self.workers - 1}")
            if not interval[2] <= interval[3]:
                raise ValueError(f"{interval}: it ends before it starts, or a time is NaN")

    @cached_property
    def by_worker(self) -> tuple[tuple[Interval, ...], ...]:
        """The intervals of each worker, in order of time."""
        rows: list[list[Interval]] = [[] for _ in range(self.workers)]
        for interval in self.intervals:
            rows[interval.worker].append(interval)
        return tuple(tuple(sorted(row, key=lambda interval: (interval.start, interval.end))) for row in rows)

    @cached_property
    def start(self) -> float:
        """The start of the first interval; 0 if there is none."""
        return min((interval.start for interval in self.intervals), default=0.0)

    @cached_property
    def end(self) -> float:
        """The end of the last interval, of computation or communication; 0 if there is none."""
        return max((interval.end for interval in chain(self.intervals, self.communication)), default=0.0)

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end, over all workers and their communication."""
        return self.end - self.start

    @property
    def span(self) -> float:
        """The longest time from a worker's first start to its last end."""
        return max((row[-1].end - row[0].start for row in self.by_worker if row), default=0.0)

    def busy(self, worker: int) -> float:
        """The total time of a worker's intervals."""
        return sum(interval.end - interval.start for interval in self.by_worker[worker])

    @property
    def bubble(self) -> float:
        """The idle share of workers x makespan, from 0 to 1."""
        return self._idle_share(self.makespan)

    @property
    def span_bubble(self) -> float:
        """The idle share of workers x span, from 0 to 1; the zero-bubble papers report this one."""
        return self._idle_share(self.span)

    def _idle_share(self, window: float) -> float:
        return idle_share([self.busy(worker) for worker in range(self.workers)], window)

    def peak_memory(self, worker: int) -> float:
        """The peak memory of a worker; 0 if memory is not known."""
        return max((interval.memory for interval in self.by_worker[worker]), default=0.0)

    def memory_steps(self, worker: int) -> tuple[tuple[float, float], ...]:
        """The memory of a worker over time.

        Returns:
            Pairs (time, amount) in order of time: the worker holds the amount from this time to the next.

        Raises:
            ValueError: there is no such worker.

        Example:
            >>> from pipework.schedule import fill_drain, simulate
            >>> simulate(fill_drain(1, 1)).timeline.memory_steps(0)
            ((0.0, 1.0), (3.0, 0.0))
        """
        if not 0 <= worker < self.workers:
            raise ValueError(f"worker is {worker}, but this timeline has the workers 0 to {self.workers - 1}")
        steps: list[tuple[float, float]] = []
        row = self.by_worker[worker]
        # What one interval frees at its end, or the next one allocates at its start, is not held between them.
        between = [min(before.memory, after.memory) for before, after in pairwise(row)]
        for interval, behind in zip(row, [*between, 0.0], strict=False):
            for time, amount in ((interval.start, interval.memory), (interval.end, behind)):
                if steps and steps[-1][0] == time:
                    steps.pop()
                if not steps or steps[-1][1] != amount:
                    steps.append((time, amount))
        return tuple(steps)

    @property
    def knows_memory(self) -> bool:
        """Whether any interval has an amount of memory."""
        return any(interval.memory for interval in self.intervals)

    def normalised(self) -> Timeline:
        """The same timeline, starting at 0."""
        if not self.start:
            return self
        moved, communication = (
            tuple(each._replace(start=each.start - self.start, end=each.end - self.start) for each in intervals)
            for intervals in (self.intervals, self.communication)
        )
        return replace(self, intervals=moved, communication=communication)


def idle_share(busy: Sequence[float], window: float) -> float:
    """The share of workers x window in which they do not compute; 0 for an empty window.

    Args:
        busy: the time that each worker computes.
        window: the time that there is.

    Example:
        >>> idle_share([3.0, 1.0], 4.0)
        0.5
    """
    if window <= 0:
        return 0.0
    # Rounding must not make the share negative.
    return max(0.0, 1.0 - sum(busy) / (len(busy) * window))
