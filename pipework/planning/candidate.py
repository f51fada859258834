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
    with_offload,
    with_recompute,
    with_skips,
)
from pipework.schedule.host_peaks import host_peaks

if TYPE_CHECKING:
    from pipework.planning.request import PlanRequest
    from pipework.planning.stages import StageSums

_FAR = 2  # times as many rows as were measured, or as few


@dataclass(frozen=True)
class Candidate:
    """What is chosen of a pipe, and the measures of its simulated step.

    Attributes:
        request: what was asked for.
        order: for each worker, the index of its device in the request.
        placement: the worker of each stage.
        chunks: the number of micro-batches.
        schedule: a name, or a schedule, which says itself what is recomputed.
        balance: the layers of each stage.
        recomputed: the number of micro-batches that each stage recomputes in a schedule by name.
        keep: the newest micro-batches of each stage whose activations stay on the device; None: all stay.
    """

    request: PlanRequest
    order: tuple[int, ...]
    placement: tuple[int, ...]
    chunks: int
    schedule: str | Schedule
    balance: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()
    keep: int | None = None

    @property
    def stages_per_worker(self) -> int:
        """The number of stages of each worker."""
        return len(self.placement) // len(self.order)

    @property
    def kinds(self) -> list[str]:
        """The kind of device of each stage."""
        return [self.request.kinds[self.order[worker]] for worker in self.placement]

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each worker."""
        return tuple(self.request.devices[index] for index in self.order)

    @property
    def sums(self) -> StageSums:
        """Sums over the layers, for micro-batches of this size."""
        return self.request.sums(self.chunks)

    @cached_property
    def costs(self) -> Costs:
        """The costs of the stages, in seconds and bytes."""
        return self.sums.costs(self.balance, self.kinds)

    def by_name(self, costs: Costs | None = None) -> Schedule:
        """The schedule that the name stands for, made for the costs."""
        assert isinstance(self.schedule, str)
        workers, each = len(self.order), self.stages_per_worker
        return build(self.schedule, workers=workers, chunks=self.chunks, stages_per_worker=each, costs=costs)

    def made(self) -> Schedule:
        """The schedule with all that belongs to it; made anew each time, since some take a gigabyte."""
        made = self.schedule
        if isinstance(made, str):
            again = [spread_evenly(count, self.chunks) for count in self.recomputed]
            made = with_recompute(self.by_name(self.costs), again)
        skips = far_skips(self.sums.skips_between(self.balance))
        made = with_skips(made, skips) if skips else made
        return made if self.keep is None else with_offload(made, self.costs, self.keep)

    @cached_property
    def _step(self) -> tuple[Measures, list[int]]:
        """The measures of the schedule with these costs, and the bytes of each worker in host memory."""
        made, costs = self.made(), self.costs
        spread = costs.spread(made.stages, len(made.skips))
        graphs = [[round(whole - left)] for whole, left in zip(spread["activation"], spread["offloaded"], strict=True)]
        of_inputs = zip(spread["checkpoint_activation"], spread["checkpoint_offloaded"], strict=True)
        inputs = [[round(whole - left)] for whole, left in of_inputs]
        return measure(made, costs), host_peaks(made, graphs, inputs)

    @property
    def measures(self) -> Measures:
        """The measures of the schedule with these costs.

        Raises:
            ValueError: the schedule does not go with the numbers of workers and micro-batches.
        """
        return self._step[0]

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.measures.makespan

    @cached_property
    def workers(self) -> tuple[WorkerBytes, ...]:
        """What each worker holds."""
        fixed, temporary = [0.0] * len(self.order), [0.0] * len(self.order)
        held, needed = self.sums.fixed_bytes(self.balance), self.sums.temporary_bytes(self.balance)
        for stage, worker in enumerate(self.placement):
            fixed[worker] += held[stage]
            temporary[worker] = max(temporary[worker], needed[stage])
        limits = [self.request.limits[device] for device in self.order]
        return tuple(map(WorkerBytes, fixed, self.measures.peak_memory, temporary, limits, self._step[1]))

    @property
    def fits(self) -> bool:
        """Whether each worker is within its limit, and what all have in host memory."""
        return all(worker.fits for worker in self.workers) and self.host_bytes <= self.request.host_memory

    @property
    def host_bytes(self) -> float:
        """What all workers have in host memory."""
        return sum(worker.host for worker in self.workers)

    @property
    def rank(self) -> tuple[bool, float]:
        """For comparing: what fits before what does not, then the faster one, or the one that is less above a limit."""
        over = max(self.host_bytes / self.request.host_memory, *(each.total / each.limit for each in self.workers))
        return not self.fits, self.seconds if self.fits else over

    def plan(self, named: Mapping[str, float] | None = None, notes: Sequence[str] = ()) -> Plan:
        """The plan.

        Args:
            named: the seconds of the best candidate of each schedule with a name.
            notes: lines before those on what the profile has no numbers for.
        """
        request = self.request
        return Plan(
            devices=self.devices,
            balance=self.balance,
            chunks=self.chunks,
            batch=request.batch,
            schedule=self.made(),
            costs=self.costs,
            workers=self.workers,
            layers=request.profile.layers,
            optimizer=request.optimizer,
            named=dict(named or {}),
            estimated=any(request.profile.kinds[kind].estimated for kind in request.kinds),
            notes=(*notes, *self._taken_for_nothing()),
        )

    def _taken_for_nothing(self) -> list[str]:
        """A line for each thing that the profile has no numbers for: messages without a link, a loss, far sizes."""
        profile, kinds, found = self.request.profile, self.kinds, []
        ways = {*pairwise(range(len(kinds))), *self.sums.skips_between(self.balance)}
        missing = {
            " and ".join(sorted((kinds[here], kinds[there])))
            for here, there in ways
            if self.placement[here] != self.placement[there] and profile.link(kinds[here], kinds[there]) is None
        }
        if missing:
            found.append(
                f"messages are taken to cost nothing between {', '.join(sorted(missing))}: the profile has no link "
                "there; measure links with pipework.planning.profile on the devices, or give them with "
                "dataclasses.replace(profile, links=...)"
            )
        if not profile.loss_inside:
            found.append("the loss is taken to cost nothing: the profile was made without target=")
        rows, least, most = -(-self.request.batch // self.chunks), profile.rows[0], profile.rows[-1]
        if rows > _FAR * most or _FAR * rows < least:
            found.append(
                f"micro-batches of {rows:,} rows are taken to cost what a line through measurements says: the profile "
                f"has those of {least:,} to {most:,} rows"
            )
        return found
