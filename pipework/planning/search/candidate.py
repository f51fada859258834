"""Candidates: one choice of cut, micro-batches, recomputation and schedule, and what a step of it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pipework.planning.profiles.stages import far_skips
from pipework.schedule import (
    Costs,
    Measures,
    Schedule,
    build,
    measure,
    spread_evenly,
    with_recompute_on_stages,
    with_skips,
)
from pipework.schedule.analysis.memory import SLACK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.planning.request import PlanRequest


@dataclass(frozen=True)
class Choice:
    """What is chosen of a pipe.

    Attributes:
        order: for each worker, the index of its device in the request.
        placement: the worker of each stage.
        chunks: the number of micro-batches.
        balance: the layers of each stage.
        recomputed: the number of micro-batches that each stage recomputes.
        schedule: a name; None: `orders` are given.
        orders: of a schedule without a name, without recomputation.
    """

    order: tuple[int, ...]
    placement: tuple[int, ...]
    chunks: int
    balance: tuple[int, ...]
    recomputed: tuple[int, ...]
    schedule: str | None
    orders: Schedule | None = None

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.order)


@dataclass(frozen=True)
class WorkerBytes:
    """The most bytes that a worker holds.

    Attributes:
        fixed: weights, gradients, buffers and the optimizer's state.
        activations: of the micro-batches in flight.
        temporary: what an action needs beside that, and messages.
        limit: the most that it may hold; infinity: no limit.
    """

    fixed: float
    activations: float
    temporary: float
    limit: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.fixed + self.activations + self.temporary

    @property
    def fits(self) -> bool:
        """Whether it is within the limit."""
        return self.total <= self.limit * SLACK


@dataclass(frozen=True)
class Candidate:
    """A choice, and the measures of its simulated step.

    Attributes:
        request: what was asked for.
        choice: what is chosen.
        costs: of its stages, in seconds and bytes.
        measures: of the schedule with these costs.
    """

    request: PlanRequest
    choice: Choice
    costs: Costs
    measures: Measures

    @property
    def schedule(self) -> Schedule:
        """The schedule, with recomputation; made anew each time, since a large one takes a gigabyte."""
        return schedule_of(self.request, self.choice, self.costs)

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.measures.makespan

    @cached_property
    def workers(self) -> tuple[WorkerBytes, ...]:
        """What each worker holds."""
        sums, choice = self.request.sums(self.choice.chunks), self.choice
        fixed, temporary = [0.0] * choice.workers, [0.0] * choice.workers
        held, needed = sums.fixed_bytes(choice.balance), sums.temporary_bytes(choice.balance)
        for stage, worker in enumerate(choice.placement):
            fixed[worker] += held[stage]
            temporary[worker] = max(temporary[worker], needed[stage])
        limits = [self.request.limits[device] for device in choice.order]
        return tuple(map(WorkerBytes, fixed, self.measures.peak_memory, temporary, limits))

    @property
    def fits(self) -> bool:
        """Whether each worker is within its limit."""
        return all(worker.fits for worker in self.workers)

    @property
    def rank(self) -> tuple[bool, float]:
        """For comparing: what fits before what does not, then the faster one."""
        return not self.fits, self.seconds if self.fits else max(each.total / each.limit for each in self.workers)


def kinds_of(request: PlanRequest, order: tuple[int, ...], placement: tuple[int, ...]) -> list[str]:
    """The kind of device of each stage."""
    kinds = request.kinds
    return [kinds[order[worker]] for worker in placement]


def evaluate(request: PlanRequest, choice: Choice) -> Candidate:
    """Simulate a choice.

    Raises:
        ValueError: the schedule does not go with the numbers of workers and micro-batches.
    """
    costs = request.sums(choice.chunks).costs(choice.balance, kinds_of(request, choice.order, choice.placement))
    return Candidate(request, choice, costs, measure(schedule_of(request, choice, costs), costs))


def schedule_of(request: PlanRequest, choice: Choice, costs: Costs) -> Schedule:
    """The schedule of a choice, with recomputation and the skip connections of its cut."""
    plain = choice.orders
    if plain is None:
        assert choice.schedule is not None
        stages_per_worker = len(choice.placement) // choice.workers
        plain = build(
            choice.schedule,
            workers=choice.workers,
            chunks=choice.chunks,
            stages_per_worker=stages_per_worker,
            costs=costs,
        )
    made = with_recompute_on_stages(plain, [spread_evenly(count, choice.chunks) for count in choice.recomputed])
    return with_the_skips(request, choice.balance, made)


def with_the_skips(request: PlanRequest, balance: Sequence[int], schedule: Schedule) -> Schedule:
    """The schedule with the skip connections between the stages of a cut."""
    skips = far_skips(request.sums(schedule.micro_batches).skips_between(balance))
    return with_skips(schedule, skips) if skips else schedule


def moved(choice: Choice, boundary: int, by: int) -> Choice | None:
    """The choice with a boundary between two stages moved by some layers; None: a stage would be empty."""
    balance = list(choice.balance)
    balance[boundary] += by
    balance[boundary + 1] -= by
    if min(balance) < 1:
        return None
    return replace(choice, balance=tuple(balance))
