"""Passes that add the recomputation of checkpointed micro-batches, and take it away."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pipework.schedule.action import Action
from pipework.schedule.analysis.validate import check
from pipework.schedule.edges import recomputed
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
    if type(checkpointed) is not int or not 0 <= checkpointed <= schedule.micro_batches:
        raise ValueError(
            f"checkpointed is {checkpointed!r}: wanted the number of checkpointed micro-batches, an integer "
            f"from 0 to {schedule.micro_batches}"
        )
    recomputing = _recomputing(schedule, [range(checkpointed)] * schedule.stages, loss_outside=loss_outside)
    check(recomputing)
    return recomputing


def with_recompute_on_stages(schedule: Schedule, checkpointed: Sequence[Collection[int]]) -> Schedule:
    """Add an ``R`` right before the backward of each checkpointed micro-batch, on each stage for its own ones.

    As in :func:`with_recompute`, a micro-batch whose backward directly follows its forward is not recomputed.

    Args:
        schedule: a schedule with backwards, without ``R`` and without transfers.
        checkpointed: for each stage, the micro-batches to recompute.

    Returns:
        A schedule of the same name; the same object if nothing is to be recomputed.

    Raises:
        ValueError: there are micro-batches for another number of stages, one of them does not exist, or the schedule
            has an ``R``, transfers, or no backwards.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> [str(action) for action in with_recompute_on_stages(fill_drain(1, 2), [{1}]).orders[0]]
        ['0F0', '0F1', '0B0', '0R1', '0B1']
    """
    if len(checkpointed) != schedule.stages:
        raise ValueError(
            f"checkpointed has {len(checkpointed)} entries: wanted {schedule.stages}, the micro-batches of each stage"
        )
    return _recomputing(schedule, checkpointed, loss_outside=False)


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


def _recomputing(schedule: Schedule, checkpointed: Sequence[Collection[int]], *, loss_outside: bool) -> Schedule:
    if schedule.inference or schedule.communicates or "R" in schedule.kinds:
        why = "no backwards" if schedule.inference else "transfers" if schedule.communicates else "recomputation"
        raise ValueError(f"schedule {schedule.name!r} has {why}: recompute in one that trains, before transfers")
    chosen = [frozenset(each) for each in checkpointed]
    for stage, each in enumerate(chosen):
        if not each <= frozenset(range(schedule.micro_batches)):
            raise ValueError(
                f"checkpointed of stage {stage} is {sorted(each)}: wanted some of the micro-batches 0 to "
                f"{schedule.micro_batches - 1}"
            )
    if not any(chosen):
        return schedule
    orders = tuple(tuple(_with_repeats(order, chosen, loss_outside=loss_outside)) for order in schedule.orders)
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
