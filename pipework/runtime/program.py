"""A checked schedule, and the actions that run with the loss inside, with the loss outside, and without gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pipework.runtime.free_memory import processes_on_host
from pipework.schedule import simulate, validate, with_communication, with_gradient_reduction, with_skips
from pipework.schedule.edges import awaited, offloaded, recomputed
from pipework.schedule.host_peaks import host_peaks
from pipework.schedule.passes.sharding import sharded_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Set

    from pipework.schedule import Action, Schedule
    from pipework.schedule.schedule import Orders


def _sending(order: Iterable[Action], skips: Set[tuple[int, int]]) -> tuple[Action, ...]:
    """The order without transfers of skips on which nothing is sent: values and gradients may go different ways.

    It stays without a deadlock, as each such transfer is left out on both sides.
    """

    def is_empty(action: Action) -> bool:
        kind, stage, _, peer = action
        way = (stage, peer) if kind.startswith("SEND") else (peer, stage)
        return peer >= 0 and abs(stage - peer) > 1 and way not in skips

    return tuple([action for action in order if not is_empty(action)])


@dataclass(frozen=True)
class Program:
    """A checked schedule.

    Attributes:
        schedule: the computation.
        lowered: the same with communication between ranks; None: all workers are in this process.
        whole_stages: of each worker so many stages are whole at most, if processes share their weights; None: all are,
            during each run.
    """

    schedule: Schedule
    lowered: Schedule | None = None
    whole_stages: int | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> Program:
        """Checks the schedule.

        Raises:
            ScheduleError: it cannot run.
            ValueError: it has no backwards, computes gradients out of order, or has communication actions.
        """
        validation = validate(schedule)
        validation.raise_if_invalid()
        lowered = (action for order in schedule.orders for action in order if not action.computes)
        if (action := next(lowered, None)) is not None:
            raise ValueError(
                f"schedule {schedule.name!r} has communication or reduction actions ({action}), which a pipe adds by "
                "itself: give the schedule from before with_communication() and with_gradient_reduction()"
            )
        if schedule.inference:
            raise ValueError(
                f"schedule {schedule.name!r} has no backwards: give one that trains; under torch.no_grad() a pipe runs "
                "the forwards of any schedule alone"
            )
        if not validation.ascending:
            raise ValueError(
                f"schedule {schedule.name!r} differentiates the micro-batches of a stage in another order than "
                "0, 1, 2, ...; the sum of their gradients would not be that of the un-partitioned model. Order them."
            )
        return cls(schedule)

    def across(self, skips: Iterable[tuple[int, int]], *, reduces: bool, whole_stages: int | None = None) -> Program:
        """The program for workers that are processes, with actions that send, receive and reduce.

        Args:
            skips: the pairs of stages of which the first sends something of a skip connection, see `Skip.hops`.
            reduces: whether gradients are summed over replicas.
            whole_stages: see the attribute.
        """
        ways = set(skips)
        lowered = with_skips(self.schedule, {(min(way), max(way)) for way in ways})
        lowered = with_communication(with_gradient_reduction(lowered) if reduces else lowered)
        lowered = replace(lowered, orders=tuple(_sending(order, ways) for order in lowered.orders))
        return replace(self, lowered=lowered, whole_stages=whole_stages)

    @cached_property
    def checkpointed(self) -> tuple[frozenset[int], ...]:
        """For each stage, the micro-batches that are recomputed."""
        return self._by_stage(recomputed(self.schedule))

    @cached_property
    def offloaded(self) -> tuple[frozenset[int], ...]:
        """For each stage, the micro-batches that are in host memory for a while."""
        return self._by_stage(offloaded(self.schedule))

    @cached_property
    def releases(self) -> frozenset[Action]:
        """The actions with which the device memory of an earlier O is free."""
        table = self.schedule.table
        return frozenset(row[position] for row in self.whole for position in awaited(row, table))

    @cached_property
    def away_at_once(self) -> list[int]:
        """For each worker, how many micro-batches of its stages are in host memory at the same time, at most."""
        each = [[1]] * self.schedule.stages
        return host_peaks(self.schedule, each, each)

    def host_share(self, workers: Collection[int]) -> float:
        """The part that a process with these workers has in what all processes on its host keep in host memory.

        Nothing tells a process what others need. So its stages count as stages like the others, and its host as one
        whose processes keep as many micro-batches as those of other hosts do on average.
        """
        own = sum(self.away_at_once[worker] for worker in workers)
        average = sum(self.away_at_once) * len(workers) / self.schedule.workers
        return own / max(1, own, average * processes_on_host())

    def _by_stage(self, pairs: Set[tuple[int, int]]) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset(micro_batch for where, micro_batch in pairs if where == stage)
            for stage in range(self.schedule.stages)
        )

    @cached_property
    def whole(self) -> Orders:
        """Forward and backward, with the loss inside."""
        return self._sharded(self._orders)

    @cached_property
    def forwards(self) -> Orders:
        """The forwards alone."""
        return self._of_phase(forward=True)

    @cached_property
    def others(self) -> Orders:
        """All other actions. Every valid schedule can be cut like this, but it holds more activations in between."""
        return self._of_phase(forward=False)

    def _of_phase(self, *, forward: bool) -> Orders:
        kinds = self.schedule.table.letters(phase="forward")
        orders = self._orders
        return self._sharded(tuple(tuple(each for each in row if (each.kind in kinds) == forward) for row in orders))

    @property
    def _orders(self) -> Orders:
        return (self.lowered or self.schedule).orders

    def _sharded(self, orders: Orders) -> Orders:
        if self.whole_stages is None:
            return orders
        return tuple(sharded_order(order, self.whole_stages, self.schedule.table) for order in orders)

    def launch_order(self, orders: Orders) -> tuple[Action, ...]:
        """The actions of all workers in one order, in which each comes after those whose values it needs.

        Args:
            orders: `whole`, `forwards` or `others`.
        """
        wanted = {action for order in orders for action in order}
        return tuple([action for action in self._launched if action in wanted])

    @cached_property
    def _launched(self) -> list[Action]:
        # By default each computation takes some time, so that none starts together with one whose value it needs.
        # Copies to and from the host take none, and stay at their places in the order of their worker.
        executed, ended = simulate(self.schedule).execution
        starts = zip(executed.orders, ended.starts, strict=True)
        rows = ((start, worker, n) for worker, (_, row) in enumerate(starts) for n, start in enumerate(row))
        return [executed.orders[worker][n] for _, worker, n in sorted(rows)]

    @cached_property
    def loss_may_be_outside(self) -> bool:
        """Whether all forwards of the schedule come before all backwards."""
        kinds = self.schedule.table.letters(phase="forward")
        return all(list(row) == sorted(row, key=lambda each: each.kind not in kinds) for row in self.schedule.orders)
