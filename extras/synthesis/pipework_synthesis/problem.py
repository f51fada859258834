"""What is to be scheduled, as flat lists of numbers, which a search can go through many thousand times.

Operations are numbers: ``(kind * stages + stage) * micro_batches + micro_batch``, with the kinds forward, gradient
(``I``, or ``B`` where backwards are whole) and weight (``W``). A recomputation is no operation of its own, but the lead
of the gradient that it precedes. All operations of one kind and stage, a lane, run in the order of micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pipework.schedule import Action, Schedule, StageCosts

FORWARD: Final = 0
GRADIENT: Final = 1
WEIGHT: Final = 2

SLACK: Final = 1 + 1e-9
"""The factor by which an amount of memory may exceed a limit, for rounding; that of :func:`simulate`."""

Orders = list[list[int]]
"""The operations of each worker, in the order in which it runs them."""


@dataclass(frozen=True)
class Problem:
    """Times, memory and limits.

    Attributes:
        placement: the worker of each stage.
        micro_batches: number of micro-batches.
        split: whether there are weight operations; otherwise a gradient operation is a whole backward.
        again: for each stage, 1 for each micro-batch that it recomputes, else 0.
        times: for each kind its time on each stage.
        leads: time of a recomputation on each stage.
        hops: time from stage s to stage s + 1; zero on one worker.
        active: memory of a micro-batch on each stage.
        small: its memory while it is checkpointed.
        waiting: its memory between the halves of its backward.
        limits: the most memory of each worker.
    """

    placement: tuple[int, ...]
    micro_batches: int
    split: bool
    again: tuple[bytes, ...]
    times: tuple[tuple[float, ...], ...]
    leads: tuple[float, ...]
    hops: tuple[float, ...]
    active: tuple[float, ...]
    small: tuple[float, ...]
    waiting: tuple[float, ...]
    limits: tuple[float, ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.limits)

    @property
    def kinds(self) -> range:
        """The kinds of operations."""
        return range(3 if self.split else 2)

    @property
    def operations(self) -> int:
        """Number of operations."""
        return len(self.kinds) * self.stages * self.micro_batches

    @property
    def resting(self) -> tuple[float, ...]:
        """The most that a micro-batch holds on each stage between its forward and its backward."""
        return tuple(
            small if all(again) else max(small, active)
            for small, active, again in zip(self.small, self.active, self.again, strict=True)
        )

    @property
    def peaks(self) -> tuple[float, ...]:
        """The most that a micro-batch ever holds on each stage."""
        return tuple(map(max, self.active, self.small, self.waiting))

    def own(self) -> list[list[int]]:
        """The stages of each worker."""
        found: list[list[int]] = [[] for _ in self.limits]
        for stage, worker in enumerate(self.placement):
            found[worker].append(stage)
        return found

    def decoded(self, operation: int) -> tuple[int, int, int]:
        """Kind, stage and micro-batch of an operation."""
        lane, micro_batch = divmod(operation, self.micro_batches)
        kind, stage = divmod(lane, self.stages)
        return kind, stage, micro_batch

    def work(self) -> float:
        """The time that the busiest worker computes for one micro-batch."""
        total = [0.0] * self.workers
        for stage, worker in enumerate(self.placement):
            lead = self.leads[stage] * sum(self.again[stage]) / self.micro_batches
            total[worker] += lead + sum(self.times[kind][stage] for kind in self.kinds)
        return max(total)


def problem_of(
    placement: Sequence[int],
    micro_batches: int,
    costs: StageCosts,
    limits: Sequence[float],
    recomputed: Sequence[Collection[int]],
    *,
    split: bool,
) -> Problem:
    """Make a problem of costs; see :class:`Problem`.

    Args:
        placement: see there, like `micro_batches`.
        micro_batches: see there.
        costs: of each stage.
        limits: the most memory of each worker.
        recomputed: for each stage, the micro-batches that it recomputes.
        split: see there.
    """
    forward, backward = costs["forward"], costs["backward"]
    hops = (
        0.0 if one == other else time
        for one, other, time in zip(placement[:-1], placement[1:], costs["transfer"], strict=True)
    )
    return Problem(
        placement=tuple(placement),
        micro_batches=micro_batches,
        split=split,
        again=tuple(bytes(i in chosen for i in range(micro_batches)) for chosen in map(frozenset, recomputed)),
        times=(forward, costs["input_gradient"], costs["weight_gradient"]) if split else (forward, backward),
        leads=costs["recompute"],
        hops=tuple(hops),
        active=costs["activation"],
        small=tuple(
            checkpoint if chosen else active
            for checkpoint, active, chosen in zip(
                costs["checkpoint_activation"], costs["activation"], recomputed, strict=True
            )
        ),
        waiting=costs["waiting"] if split else costs["activation"],
        limits=tuple(limit * SLACK for limit in limits),
    )


def in_integers(problem: Problem) -> tuple[Problem, int, bool]:
    """The problem with integer times, for exact comparisons and for the solver.

    Returns:
        The problem; how many of its units are one unit of the costs; whether it is the same problem, or one with
        rounded times.

    Example:
        >>> from pipework.schedule import Costs
        >>> half = problem_of((0, 1), 2, Costs(forward=0.5).spread(2), (2, 2), [(), ()], split=True)
        >>> in_integers(half)[1:]
        (2, True)
    """
    numbers = [*(time for kind in problem.times for time in kind), *problem.hops]
    numbers += [lead for lead, again in zip(problem.leads, problem.again, strict=True) if any(again)]
    scale, exact = integer_scale(numbers, 2000)

    def whole(values: Iterable[float]) -> tuple[int, ...]:
        return tuple(round(value * scale) for value in values)

    times = tuple(map(whole, problem.times))
    return replace(problem, times=times, leads=whole(problem.leads), hops=whole(problem.hops)), scale, exact


def integer_scale(numbers: Sequence[float], most: int) -> tuple[int, bool]:
    """The smallest factor up to `most` that makes all numbers integers.

    Returns:
        The factor and True; or, if there is none, one that makes them numbers of about `most`, and False.

    Example:
        >>> integer_scale([0.25, 1.1], 2000), integer_scale([1 / 3, 0.7071], 2000)[1]
        ((20, True), False)
    """
    for scale in range(1, most + 1):
        if all(abs(number * scale - round(number * scale)) < 1e-9 * max(1.0, number * scale) for number in numbers):
            return scale, True
    largest = max(numbers, default=1.0) or 1.0
    return max(1, round(most / largest)), False


def orders_of(problem: Problem, schedule: Schedule) -> Orders | None:
    """The operations of a schedule; None if it has other ones, such as halves of a backward that is to be whole.

    Within a lane, micro-batches are put into ascending order.
    """
    m, stages = problem.micro_batches, problem.stages
    count = [0] * (len(problem.kinds) * stages)

    def following(kind: int, stage: int) -> int:
        lane = kind * stages + stage
        count[lane] += 1
        return lane * m + count[lane] - 1

    orders: Orders = []
    for order in schedule.orders:
        own: list[int] = []
        for kind, stage, _, _ in order:
            if kind == "F":
                own.append(following(FORWARD, stage))
            elif kind == "B":
                own.append(following(GRADIENT, stage))
                if problem.split:
                    own.append(following(WEIGHT, stage))
            elif kind in ("I", "W"):
                if not problem.split:
                    return None
                own.append(following(GRADIENT if kind == "I" else WEIGHT, stage))
        orders.append(own)
    return orders if all(each == m for each in count) else None


def schedule_of(problem: Problem, orders: Orders, name: str = "synthesised") -> Schedule:
    """The schedule with these operations; a recomputation is left out right after its forward on its worker."""
    letters = ("F", "I" if problem.split else "B", "W")
    made = []
    for order in orders:
        actions: list[Action] = []
        for operation in order:
            kind, stage, micro_batch = problem.decoded(operation)
            if kind == GRADIENT and problem.again[stage][micro_batch]:
                before = actions[-1] if actions else None
                if before != Action("F", stage, micro_batch):
                    actions.append(Action("R", stage, micro_batch))
            actions.append(Action(letters[kind], stage, micro_batch))
        made.append(tuple(actions))
    return Schedule(name, problem.placement, tuple(made))


def least_room(problem: Problem) -> list[float]:
    """The memory that one micro-batch needs on each worker.

    Example:
        >>> from pipework.schedule import Costs
        >>> costs = Costs(activation=[1, 2, 3, 4]).spread(4)
        >>> least_room(problem_of((0, 1, 1, 0), 1, costs, (9, 9), [()] * 4, split=True))
        [5.0, 5.0]
    """
    needed = []
    peaks, resting = problem.peaks, problem.resting
    for stages in problem.own():
        held = most = 0.0
        for stage in stages:
            most = max(most, held + peaks[stage])
            held += resting[stage]
        needed.append(most)
    return needed
