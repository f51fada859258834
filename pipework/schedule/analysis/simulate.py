"""Simulation: times and memory of a schedule with given costs, alone or with the timeline of all actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import sub

from pipework.schedule.analysis import memory
from pipework.schedule.analysis.bounds import lower_bound
from pipework.schedule.analysis.channels import Channel
from pipework.schedule.analysis.critical_path import critical_path
from pipework.schedule.analysis.events import Run
from pipework.schedule.analysis.validate import Validation, ValidationOptions, examine
from pipework.schedule.costs import Costs, StageCosts, checked
from pipework.schedule.draw.svg import svg
from pipework.schedule.edges import recomputed
from pipework.schedule.schedule import Schedule, checked_schedule
from pipework.schedule.timeline import Interval, Timeline, idle_share


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


@dataclass(frozen=True)
class Simulation(Measures):
    """A predicted timeline and its measures.

    ``makespan`` is the time of a step if workers synchronize at its end, for example to clip gradients; ``span`` is its
    time if they do not.

    Attributes:
        schedule: the schedule.
        costs: its costs.
        options: the options of :func:`simulate`.
        execution: the schedule that was run, which has transfers if the channel needs them, and its run.
    """

    schedule: Schedule
    costs: Costs
    options: ValidationOptions
    execution: tuple[Schedule, Run] = field(repr=False, compare=False)  # follows from the others

    def _repr_svg_(self) -> str:
        return svg(self.timeline)

    def __repr__(self) -> str:
        return f"Simulation({self.schedule.title}: makespan {self.makespan:.4g}, bubble {self.bubble:.1%})"

    @cached_property
    def timeline(self) -> Timeline:
        """Start, end and memory of every action in units of the costs, made when it is first asked for.

        It has transfers if the schedule has them or the channel needs them.
        """
        table = self.schedule.table
        computations = table.letters(scope="micro-batch")
        computing: list[Interval] = []
        communicating: list[Interval] = []
        for worker in range(self.schedule.workers):
            for each in self._intervals(worker):
                if (kind := each.action.kind) in computations:
                    computing.append(each)
                elif table[kind].cost:
                    communicating.append(each)
        workers, title = self.schedule.workers, self.schedule.title
        return Timeline(tuple(computing), workers, title=title, communication=tuple(communicating), table=table)

    def _intervals(self, worker: int) -> Iterator[Interval]:
        """The actions of a worker, in its order."""
        executed, ended = self.execution
        computations = executed.table.letters(scope="micro-batch")
        order = executed.orders[worker]
        columns = ended.starts[worker], ended.ends[worker], *memory.amounts(executed, order, self._spread)
        for action, start, end, most, held in zip(order, *columns, strict=True):
            memories = (most, 0, held) if action.kind in computations else ()
            yield Interval(worker, action, start, end, *memories)

    @cached_property
    def _spread(self) -> StageCosts:
        return self.costs.spread(self.schedule.stages, len(self.schedule.skips))

    @property
    def stage_peak_memory(self) -> tuple[float, ...]:
        """The peak memory of each stage's activations.

        The stages of one worker may reach their peaks at different times.
        """
        return memory.stage_peaks(self.schedule, self._spread)

    @cached_property
    def exposed_communication(self) -> float:
        """The time that transfers, reductions, and copies to and from the host add to the makespan."""
        free = replace(self.costs, transfer=0.0, skip_transfer=0.0, reduce_gradient=0.0, offload=0.0, reload=0.0)
        return self.makespan - measure(self.schedule, free, loss_outside=self.options.loss_outside).makespan

    @cached_property
    def lower_bound(self) -> float:
        """The makespan that no schedule beats with these costs, this placement and this memory.

        The memory is the given limit, or each worker's peak in this simulation. Backwards may be split if this
        schedule splits any.
        """
        repeats = Counter(stage for stage, _ in recomputed(self.schedule))
        limit = self.peak_memory if self.options.memory_limit is None else self.options.memory_limit
        held = {self.schedule.table[kind].holds for kind in self.schedule.kinds}
        return lower_bound(
            self.schedule.placement,
            self.schedule.micro_batches,
            replace(self.costs, skip_transfer=0.0),
            # The bounds do not know of kinds that take memory away between a forward and its backward.
            memory_limit=limit if held <= {None, "", "activation", "waiting", "weights"} else None,
            split=bool(self.schedule.split_stages),
            inference=self.schedule.inference,
            recomputed=[repeats[stage] for stage in range(self.schedule.stages)],
        )

    @property
    def gap(self) -> float:
        """The excess of the makespan over its lower bound, as a share of that; 0 if no schedule can be faster."""
        return max(0.0, self.makespan / self.lower_bound - 1.0) if self.lower_bound else 0.0

    @cached_property
    def critical_path(self) -> tuple[Interval, ...]:
        """A chain of actions, from the first to the last, each of which starts when the one before it ends.

        A shorter step needs one of them to be shorter or to move. The path includes the transfers between workers if
        the timeline has transfers; a transfer begins when the later of its two sides is posted.
        """
        path = critical_path(*self.execution)
        rows = {worker: list(self._intervals(worker)) for worker in {worker for worker, _ in path}}
        return tuple(rows[worker][position] for worker, position in path)


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    loss_outside: bool = False,
    channel: Channel = "unbounded",
    memory_limit: float | Sequence[float] | None = None,
) -> Simulation:
    """Predict the times of all actions and the memory of all workers.

    Workers run their orders, each action as early as its data allows. A boundary between two workers takes
    ``costs.transfer``, a skip ``costs.skip_transfer``; workers compute meanwhile. Reductions of gradients run beside
    the computation, one after the other on each worker. So do copies to the host, and those back; a worker waits for
    its copy to the host at the next ``O``, or at an ``L`` after a computation.

    The time of a simulation is linear in the number of actions, transfers included. The timeline, which has an object
    for each action, is made when it is first asked for; :func:`measure` has the measures alone.

    Args:
        schedule: a valid schedule.
        costs: unit costs if None, see :class:`Costs`.
        loss_outside: whether the loss is computed outside of the pipe: no backward (or recompute) starts before the
            forwards of all workers have ended.
        channel: the transport of transfers, see :mod:`pipework.schedule.analysis.channels`. Unless it is
            ``"unbounded"``, transfers are added to a schedule without them, as by :func:`with_communication`.
        memory_limit: the most memory that a worker may hold, or a number for each worker; None: no limit.

    Raises:
        ScheduleError: the schedule cannot be executed, or not within the limit.
        TypeError: the schedule, the costs or a limit have a wrong type.
        ValueError: the channel is unknown, a limit is out of range, or the costs are for another number of stages.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> result = simulate(fill_drain(4, 8))
        >>> result.makespan, round(100 * result.bubble, 1), max(result.peak_memory)
        (33.0, 27.3, 8.0)
    """
    costs = checked(costs)
    options = ValidationOptions(loss_outside, channel, memory_limit)
    found, execution = _executed(schedule, costs, options)
    return Simulation(**vars(found), schedule=schedule, costs=costs, options=options, execution=execution)


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
    return _executed(schedule, checked(costs), ValidationOptions(loss_outside))[0]


def _executed(schedule: Schedule, costs: Costs, options: ValidationOptions) -> tuple[Measures, tuple[Schedule, Run]]:
    """The measures of a schedule that can be executed, the schedule that was run, and its run."""
    spread = costs.spread(checked_schedule(schedule).stages, len(schedule.skips))
    violations, executed, ended = examine(schedule, spread, options)
    Validation(schedule.name, violations, ascending=True).raise_if_invalid()
    assert ended is not None  # without a run there are violations
    return measures(executed, ended, spread), (executed, ended)


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
    computations = executed.table.letters(scope="micro-batch")
    beside = executed.table.letters(beside=True)
    first, last, span = [], [], [0.0]
    busy = []
    peaks = []
    for worker, order in enumerate(executed.orders):
        starts: Sequence[float] = ended.starts[worker]
        ends: Sequence[float] = ended.ends[worker]
        most: Sequence[float] = memory.amounts(executed, order, costs)[0]
        last.append(max(ends, default=0.0))
        if not executed.kinds.issubset(computations):
            # Transfers, copies and reductions run beside the computation; a worker waits for weights that it gathers.
            begin = next((n for n, action in enumerate(order) if action[0] not in beside), None)
            first.append(0.0 if begin is None else starts[begin])
            computing = [position for position, action in enumerate(order) if action[0] in computations]
            starts, ends = ([row[position] for position in computing] for row in (starts, ends))
        busy.append(sum(map(sub, ends, starts)))
        peaks.append(max(most, default=0.0))
        if starts:
            first.append(starts[0])
            span.append(ends[-1] - starts[0])
    start = min(first, default=0.0)
    return Measures(max(last) - start, max(span), start, tuple(busy), tuple(peaks))
