"""Candidates: one choice of cut, micro-batches, recomputation and schedule, what a step of it costs, and its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from pipework.planning.plan import Plan, WorkerBytes
from pipework.planning.stages import far_skips
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

if TYPE_CHECKING:
    from pipework.planning.request import PlanRequest

_FAR = 2  # times as many rows as were measured, or as few


@dataclass(frozen=True)
class Choice:
    """What is chosen of a pipe.

    Attributes:
        order: for each worker, the index of its device in the request.
        placement: the worker of each stage.
        chunks: the number of micro-batches.
        balance: the layers of each stage.
        recomputed: the number of micro-batches that each stage recomputes in a schedule by name.
        schedule: a name, or a schedule, which says itself what is recomputed.
    """

    order: tuple[int, ...]
    placement: tuple[int, ...]
    chunks: int
    balance: tuple[int, ...]
    recomputed: tuple[int, ...]
    schedule: str | Schedule

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.order)

    def kinds(self, request: PlanRequest) -> list[str]:
        """The kind of device of each stage."""
        return [request.kinds[self.order[worker]] for worker in self.placement]


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
        return _schedule_of(self.request, self.choice, self.costs)

    @property
    def devices(self) -> list[str]:
        """The device of each worker."""
        return [self.request.devices[index] for index in self.choice.order]

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
    def shares(self) -> list[float]:
        """What each worker holds, as a share of its limit."""
        return [each.total / each.limit for each in self.workers]

    @property
    def rank(self) -> tuple[bool, float]:
        """For comparing: what fits before what does not, then the faster one."""
        return not self.fits, self.seconds if self.fits else max(self.shares)


def evaluate(request: PlanRequest, choice: Choice) -> Candidate:
    """Simulate a choice.

    Raises:
        ValueError: the schedule does not go with the numbers of workers and micro-batches.
    """
    costs = request.sums(choice.chunks).costs(choice.balance, choice.kinds(request))
    return Candidate(request, choice, costs, measure(_schedule_of(request, choice, costs), costs))


def _schedule_of(request: PlanRequest, choice: Choice, costs: Costs) -> Schedule:
    """The schedule of a choice, with recomputation and the skip connections of its cut."""
    made = choice.schedule
    if isinstance(made, str):
        each = len(choice.placement) // choice.workers
        plain = build(made, workers=choice.workers, chunks=choice.chunks, stages_per_worker=each, costs=costs)
        made = with_recompute_on_stages(plain, [spread_evenly(count, choice.chunks) for count in choice.recomputed])
    skips = far_skips(request.sums(choice.chunks).skips_between(choice.balance))
    return with_skips(made, skips) if skips else made


def plan_of(candidate: Candidate, named: Mapping[str, float] | None = None, notes: Sequence[str] = ()) -> Plan:
    """The plan of a candidate.

    Args:
        candidate: simulated already.
        named: the seconds of the best candidate of each schedule with a name.
        notes: lines before those on what the profile has no numbers for.
    """
    request, choice = candidate.request, candidate.choice
    return Plan(
        devices=tuple(candidate.devices),
        balance=choice.balance,
        chunks=choice.chunks,
        batch=request.batch,
        schedule=candidate.schedule,
        costs=candidate.costs,
        workers=candidate.workers,
        layers=request.profile.layers,
        optimizer=request.optimizer,
        named=dict(named or {}),
        estimated=any(request.profile.kinds[kind].estimated for kind in request.kinds),
        notes=(*notes, *_taken_for_nothing(candidate)),
    )


def _taken_for_nothing(candidate: Candidate) -> list[str]:
    """A line for each thing that the profile has no numbers for: messages without a link, a loss, far sizes."""
    request, choice = candidate.request, candidate.choice
    profile, kinds = request.profile, choice.kinds(request)
    ways = {*pairwise(range(len(kinds))), *request.sums(choice.chunks).skips_between(choice.balance)}
    missing = {
        " and ".join(repr(kind) for kind in sorted((kinds[here], kinds[there])))
        for here, there in ways
        if choice.placement[here] != choice.placement[there] and profile.link(kinds[here], kinds[there]) is None
    }
    found = []
    if missing:
        where = (
            f"the profile has no link between {' or '.join(sorted(missing))}"
            if profile.links
            else "the profile has no links"
        )
        found.append(
            f"messages between devices are taken to cost nothing: {where}; measure links with "
            "pipework.planning.profile on the devices, or give them with dataclasses.replace(profile, links=...)"
        )
    if not profile.loss_inside:
        found.append("the loss is taken to cost nothing: the profile was made without target=")
    rows, measured = -(-request.batch // choice.chunks), (profile.rows[0], profile.rows[-1])
    if rows > _FAR * measured[1] or _FAR * rows < measured[0]:
        found.append(
            f"micro-batches of {rows:,} rows are taken to cost what a line through measurements says: the profile has "
            f"those of {' to '.join(f'{size:,}' for size in dict.fromkeys(measured))} rows"
        )
    return found
