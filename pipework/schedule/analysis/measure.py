"""The measures of a schedule with given costs, without a timeline: for the comparison of many or large schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

from pipework.schedule.action import KINDS
from pipework.schedule.analysis.events import Run
from pipework.schedule.analysis.memory import amounts
from pipework.schedule.analysis.validate import ValidationOptions, examine, raise_first
from pipework.schedule.costs import Costs, StageCosts, checked
from pipework.schedule.schedule import Schedule, checked_schedule
from pipework.schedule.timeline import idle_share


@dataclass(frozen=True)
class Measures:
    """Times and memory of a simulated step.

    Attributes:
        makespan: end of the last action minus start of the first, over all workers and their communication.
        span: the longest time from a worker's first start to its last end.
        start: the start of the first action; the first actions of a run start at 0.
        busy: the time that each worker computes.
        peak_memory: the peak memory of each worker's activations.
    """

    makespan: float
    span: float
    start: float
    busy: tuple[float, ...]
    peak_memory: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The idle share of workers x makespan, from 0 to 1."""
        return idle_share(self.busy, self.makespan)

    @property
    def span_bubble(self) -> float:
        """The idle share of workers x span, from 0 to 1."""
        return idle_share(self.busy, self.span)


def measure(schedule: Schedule, costs: Costs | None = None, *, loss_outside: bool = False) -> Measures:
    """Predict times and memory of a step, as :func:`simulate` does, but not those of each action.

    All measures are equal to those of :func:`simulate`, to the last bit. Transfers have a channel each
    (``"unbounded"``). Of a schedule with millions of actions it takes about two microseconds, and 25 bytes, for each
    action.

    Args:
        schedule: a valid schedule.
        costs: unit costs if None, see :class:`Costs`.
        loss_outside: whether the loss is computed outside of the pipe: no backward (or recompute) starts before the
            forwards of all workers have ended.

    Raises:
        ScheduleError: the schedule cannot be executed.
        TypeError: the schedule or the costs have a wrong type.
        ValueError: the costs are for another number of stages.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> found = measure(fill_drain(4, 8))
        >>> found.makespan, round(100 * found.bubble, 1), max(found.peak_memory)
        (33.0, 27.3, 8.0)
    """
    spread = checked(costs).spread(checked_schedule(schedule).stages, len(schedule.skips))
    violations, executed, ended = examine(schedule, spread, ValidationOptions(loss_outside))
    raise_first(schedule.name, violations)
    assert ended is not None  # without a run there are violations
    return measures(executed, ended, spread)


def measures(executed: Schedule, ended: Run, costs: StageCosts) -> Measures:
    """The measures of a run without a deadlock.

    Args:
        executed: the schedule that was run.
        ended: its run.
        costs: the memory of each stage.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> from pipework.schedule.analysis.events import run
        >>> spread = Costs().spread(1)
        >>> measures(fill_drain(1, 1), run(fill_drain(1, 1), spread), spread).busy
        (3.0,)
    """
    first, last, span = [], [], [0.0]
    busy = []
    peaks = []
    for worker, order in enumerate(executed.orders):
        starts: Sequence[float] = ended.starts[worker]
        ends: Sequence[float] = ended.ends[worker]
        most: Sequence[float] = amounts(executed, worker, costs)[0]
        last.append(max(ends, default=0.0))
        if not executed.kinds.issubset(KINDS):
            # Transfers and reductions run beside the computation; a worker waits for the weights that it gathers.
            begin = next((n for n, action in enumerate(order) if action[0] in (*KINDS, "UNSHARD")), None)
            first.append(0.0 if begin is None else starts[begin])
            computing = [position for position, action in enumerate(order) if action[0] in KINDS]
            starts, ends, most = ([row[position] for position in computing] for row in (starts, ends, most))
        busy.append(sum(map(sub, ends, starts)))
        peaks.append(max(most, default=0.0))
        if starts:
            first.append(starts[0])
            span.append(ends[-1] - starts[0])
    start = min(first, default=0.0)
    return Measures(max(last) - start, max(span), start, tuple(busy), tuple(peaks))
