"""Passes that add communication: skip connections, transfers between workers, and reductions over replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from pipework.schedule.action import Action
from pipework.schedule.analysis.channels import Channel, check_channel
from pipework.schedule.analysis.validate import check
from pipework.schedule.argument_checks import checked_skips
from pipework.schedule.costs import Costs, checked
from pipework.schedule.passes.posting import posted, timed_for_posting
from pipework.schedule.schedule import Schedule


def with_skips(schedule: Schedule, skips: Iterable[tuple[int, int]]) -> Schedule:
    """Add skip connections: values that one stage passes to a later one, past the stages between them.

    For a skip from s to t, the forward of t needs the forward of s, and the backward of s needs the backward of t.
    Skips within a stage, and to the next one, to which a value is sent anyway, are left out.

    Args:
        schedule: a schedule without transfers.
        skips: (s, t) pairs of stages; duplicates, and pairs that the schedule has already, count once.

    Returns:
        A schedule with the same orders, and all skips in ascending order.

    Raises:
        ValueError: a stage does not exist, a skip goes back, or the schedule has transfers.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> with_skips(fill_drain(4, 2), [(0, 3), (1, 2), (0, 3)]).skips
        ((0, 3),)
    """
    _refuse_lowered(schedule, "add skips before transfers")
    pairs = sorted({*checked_skips(skips), *schedule.skips})
    for source, target in pairs:
        if not 0 <= source <= target < schedule.stages:
            raise ValueError(
                f"a skip goes from stage {source} to stage {target}: wanted two of the stages 0 to "
                f"{schedule.stages - 1}, the earlier one first"
            )
    skipping = replace(schedule, skips=tuple((source, target) for source, target in pairs if target > source + 1))
    check(skipping)
    return skipping


def with_communication(schedule: Schedule, costs: Costs | None = None, *, channel: Channel = "pair") -> Schedule:
    """Add a ``SEND`` and a ``RECV`` for every value and gradient that goes from one worker to another.

    A send comes right after the action that makes its value; it is posted, and no worker waits for it. A receive is
    posted before the action that needs it, in the order in which the peer sends: before the action that runs, with
    these costs, when the value is sent, and at least one action early. Boundaries and skips between stages of one
    worker need no transfers.

    ``channel="worker"`` is for transports in which all transfers of a worker share one queue (one communicator). There
    the positions of receives follow the times of their sends exactly, so that there is no deadlock. Such orders run on
    the other channels as well.

    Args:
        schedule: a valid schedule without transfers; recomputation must be added before.
        costs: times; unit costs if None. They decide the positions of receives, not whether the result can be executed.
        channel: the transport of the transfers, see :mod:`pipework.schedule.analysis.channels`.

    Returns:
        The schedule with transfers; the computation keeps its order.

    Raises:
        ScheduleError: the schedule cannot be executed.
        ValueError: the schedule has transfers, the channel is unknown, or the costs are for another number of stages.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> [str(action) for action in with_communication(fill_drain(2, 1)).orders[1]]
        ['1RECV_F0', '1F0', '1B0', '1SEND_B0']
    """
    _refuse_lowered(schedule, "pass the schedule without them")
    check_channel(channel)
    check(schedule, costs)
    spread = checked(costs).spread(schedule.stages, len(schedule.skips))
    lowered = posted(schedule, timed_for_posting(schedule, spread), channel)
    check(lowered, channel=channel)
    return lowered


def with_gradient_reduction(schedule: Schedule) -> Schedule:
    """Add a ``REDUCE_GRAD`` for every stage, after the last action that adds to its gradient.

    It adds up the gradients over replicas of the model (data parallelism) while the worker runs its other stages and
    other workers drain the pipe.

    Args:
        schedule: a valid schedule for training, without reductions.

    Raises:
        ScheduleError: the schedule cannot be executed.
        ValueError: the schedule has reductions, or no backwards.

    Example:
        >>> from pipework.schedule import looped_bfs
        >>> [str(action) for action in with_gradient_reduction(looped_bfs(1, 1, 2)).orders[0]]
        ['0F0', '1F0', '1B0', '1REDUCE_GRAD', '0B0', '0REDUCE_GRAD']
    """
    if schedule.inference or "REDUCE_GRAD" in schedule.kinds:
        why = "no backwards" if schedule.inference else "reductions"
        raise ValueError(f"schedule {schedule.name!r} has {why}: pass one that trains, without reductions")
    check(schedule)
    adding = {row.letter for row in schedule.table.values() if row.adds}
    reducing = replace(schedule, orders=tuple(tuple(_reduced(order, adding)) for order in schedule.orders))
    check(reducing)
    return reducing


def _reduced(order: Iterable[Action], adding: Set[str]) -> Iterator[Action]:
    order = tuple(order)
    last = {action.stage: position for position, action in enumerate(order) if action.kind in adding}
    ready: list[int] = []
    for position, action in enumerate(order):
        if not action.kind.startswith("SEND"):  # another worker waits for a send, so it goes first
            yield from (Action("REDUCE_GRAD", stage) for stage in ready)
            ready.clear()
        yield action
        if last.get(action.stage) == position:
            ready.append(action.stage)
    yield from (Action("REDUCE_GRAD", stage) for stage in ready)


def _refuse_lowered(schedule: Schedule, why: str) -> None:
    if schedule.communicates:
        raise ValueError(f"schedule {schedule.name!r} already has transfers: {why}")
