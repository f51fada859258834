"""A pass that adds the recomputation of checkpointed micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipework.schedule.action import Action
from pipework.schedule.analysis.validate import check
from pipework.schedule.argument_checks import refuse_kind
from pipework.schedule.schedule import Schedule


def with_recompute(schedule: Schedule, checkpointed: int, *, loss_outside: bool = False) -> Schedule:
    """Add an ``R`` right before the backward of every checkpointed micro-batch, on every stage.

    ``R`` needs only the stored input of the stage, so a worker recomputes while it would otherwise wait for the
    incoming gradient.

    If a micro-batch's backward directly follows its forward, as on the last worker of 1F1B, checkpointing would save no
    memory. Such a micro-batch is not checkpointed there, unless the loss is computed between the two.

    Args:
        schedule: a schedule without ``R``.
        checkpointed: the micro-batches 0 to ``checkpointed - 1`` are checkpointed; from 0 (none) to all.
        loss_outside: whether the loss is computed outside of the pipe, after all forwards. The result is validated with
            the loss inside, since a pipe may also run all forwards first.

    Returns:
        A schedule of the same name; the same object if no micro-batch is checkpointed.

    Raises:
        ScheduleError: the schedule cannot be executed.
        ValueError: ``checkpointed`` is out of range, or the schedule has an ``R``, transfers, or no backwards.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> [str(action) for action in with_recompute(fill_drain(1, 2), 1).orders[0]]
        ['0F0', '0F1', '0R0', '0B0', '0B1']
    """
    if schedule.inference:
        raise ValueError(f"schedule {schedule.name!r} has no backwards, so nothing can be recomputed")
    if type(checkpointed) is not int or not 0 <= checkpointed <= schedule.micro_batches:
        raise ValueError(
            f"checkpointed is {checkpointed!r}: wanted the number of checkpointed micro-batches, an integer "
            f"from 0 to {schedule.micro_batches}"
        )
    if schedule.communicates:
        raise ValueError(f"schedule {schedule.name!r} has transfers: add recomputation before transfers")
    refuse_kind(schedule, "R", "recomputes")
    if not checkpointed:
        return schedule
    orders = tuple(tuple(_recomputed(order, checkpointed, loss_outside)) for order in schedule.orders)
    recomputing = replace(schedule, orders=orders)
    check(recomputing)
    return recomputing


def _recomputed(order: tuple[Action, ...], checkpointed: int, loss_outside: bool) -> Iterator[Action]:
    before: Action | None = None
    for action in order:
        kind, stage, micro_batch, _ = action
        follows_at_once = before == Action("F", stage, micro_batch) and not loss_outside
        if kind in ("B", "I") and micro_batch < checkpointed and not follows_at_once:
            yield Action("R", stage, micro_batch)
        yield action
        before = action
