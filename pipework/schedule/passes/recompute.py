"""Passes that add the recomputation of checkpointed micro-batches, and take it away."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pipework.schedule.action import Action
from pipework.schedule.edges import recomputed
from pipework.schedule.schedule import Schedule


def with_recompute(
    schedule: Schedule, checkpointed: int | Sequence[Collection[int]], *, loss_outside: bool = False
) -> Schedule:
    """Add an ``R`` right before the backward of every checkpointed micro-batch.

    ``R`` needs only the stored input of the stage, so a worker recomputes while it would otherwise wait for the
    incoming gradient.

    If a micro-batch's backward directly follows its forward, as on the last worker of 1F1B, checkpointing would save no
    memory. Such a micro-batch is not checkpointed there, unless the loss is computed between the two.

    Args:
        schedule: a schedule with backwards, without ``R`` and without transfers.
        checkpointed: the micro-batches 0 to ``checkpointed - 1`` are checkpointed on every stage; from 0 (none) to all.
            Or for each stage its checkpointed micro-batches.
        loss_outside: whether the loss is computed outside of the pipe, after all forwards.

    Returns:
        A schedule of the same name; the same object if no micro-batch is checkpointed.

    Raises:
        ValueError: ``checkpointed`` is out of range, or the schedule has an ``R``, transfers, or no backwards.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> [str(action) for action in with_recompute(fill_drain(1, 2), 1).orders[0]]
        ['0F0', '0F1', '0R0', '0B0', '0B1']
        >>> [str(action) for action in with_recompute(fill_drain(1, 2), [{1}]).orders[0]]
        ['0F0', '0F1', '0B0', '0R1', '0B1']
    """
    count, each = schedule.micro_batches, checkpointed
    if type(checkpointed) is int and 0 <= checkpointed <= count:
        each = [range(checkpointed)] * schedule.stages
    chosen = [frozenset(some) for some in each] if isinstance(each, Sequence) else []
    if len(chosen) != schedule.stages or not frozenset().union(*chosen) <= frozenset(range(count)):
        raise ValueError(
            f"checkpointed is {checkpointed!r}: wanted the number of checkpointed micro-batches, an integer from 0 to "
            f"{count}, or for each of the {schedule.stages} stages some of the micro-batches 0 to {count - 1}"
        )
    if schedule.inference or schedule.communicates or "R" in schedule.kinds:
        why = "no backwards" if schedule.inference else "transfers" if schedule.communicates else "recomputation"
        raise ValueError(f"schedule {schedule.name!r} has {why}: recompute in one that trains, before transfers")
    if not any(chosen):
        return schedule
    orders = tuple(tuple(_with_repeats(order, chosen, loss_outside=loss_outside)) for order in schedule.orders)
    return replace(schedule, orders=orders)


def spread_evenly(count: int, micro_batches: int) -> frozenset[int]:
    """Choose some of the micro-batches, as far from each other as possible.

    Schedules in which forwards and backwards alternate hold a few consecutive micro-batches at a time, so what
    recomputed ones save is saved at all times if they are spread evenly.

    Example:
        >>> sorted(spread_evenly(3, 8))
        [2, 5, 7]
    """
    return frozenset(i for i in range(micro_batches) if (i + 1) * count // micro_batches > i * count // micro_batches)


def without_recompute(schedule: Schedule) -> Schedule:
    """Drop every ``R``.

    Returns:
        A schedule of the same name; the same object if it has none.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> without_recompute(with_recompute(fill_drain(2, 2), 1)) == fill_drain(2, 2)
        True
    """
    if not recomputed(schedule):
        return schedule
    orders = tuple(tuple(action for action in order if action.kind != "R") for order in schedule.orders)
    return replace(schedule, orders=orders)


def _with_repeats(
    order: Sequence[Action], checkpointed: Sequence[frozenset[int]], *, loss_outside: bool
) -> Iterator[Action]:
    before: Action | None = None
    for action in order:
        kind, stage, micro_batch, _ = action
        follows_at_once = before == Action("F", stage, micro_batch) and not loss_outside
        if kind in ("B", "I") and micro_batch in checkpointed[stage] and not follows_at_once:
            yield Action("R", stage, micro_batch)
        yield action
        before = action
