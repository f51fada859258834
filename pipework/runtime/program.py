"""A checked schedule, and the actions that run with the loss inside, with the loss outside, and without gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pipework.schedule import KINDS, split_at_loss, validate, with_communication, with_gradient_reduction, with_skips
from pipework.schedule.edges import recomputed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipework.schedule import Schedule
    from pipework.schedule.phases import Orders


_FORWARD = ("F", "SEND_F", "RECV_F")


@dataclass(frozen=True)
class Program:
    """A checked schedule.

    Attributes:
        schedule: the computation.
        lowered: the same with communication between ranks; None: all workers are in this process.
    """

    schedule: Schedule
    lowered: Schedule | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> Program:
        """Checks the schedule.

        Raises:
            ScheduleError: it cannot run.
            ValueError: it has no backwards, computes gradients out of order, or has communication actions.
        """
        validation = validate(schedule)
        validation.raise_if_invalid()
        lowered = (action for order in schedule.orders for action in order if action.kind not in KINDS)
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

    def across(self, skips: Iterable[tuple[int, int]], *, reduces: bool) -> Program:
        """The program for workers that are processes, with actions that send, receive and reduce.

        Args:
            skips: the pairs of stages between which skip connections go, see `Skip.hops`.
            reduces: whether gradients are summed over replicas.
        """
        lowered = with_skips(self.schedule, skips)
        lowered = with_communication(with_gradient_reduction(lowered) if reduces else lowered)
        return replace(self, lowered=lowered)

    @cached_property
    def checkpointed(self) -> tuple[frozenset[int], ...]:
        """For each stage, the micro-batches that are recomputed."""
        pairs = recomputed(self.schedule)
        return tuple(
            frozenset(micro_batch for where, micro_batch in pairs if where == stage)
            for stage in range(self.schedule.stages)
        )

    @property
    def whole(self) -> Orders:
        """Forward and backward, with the loss inside."""
        return (self.lowered or self.schedule).orders

    @cached_property
    def forwards(self) -> Orders:
        """The forwards alone."""
        return tuple(tuple(action for action in order if action.kind in _FORWARD) for order in self.whole)

    @cached_property
    def others(self) -> Orders:
        """All other actions. Every valid schedule can be cut like this, but it holds more activations in between."""
        return tuple(tuple(action for action in order if action.kind not in _FORWARD) for order in self.whole)

    @cached_property
    def loss_may_be_outside(self) -> bool:
        """Whether all forwards of the schedule come before all backwards."""
        try:
            split_at_loss(self.schedule)
        except ValueError:
            return False
        return True
