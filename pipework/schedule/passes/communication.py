"""Passes that say what goes between stages and workers: skip connections, transfers, and sums over replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipework.schedule.action import Action
from pipework.schedule.analysis.channels import Channel, check_channel
from pipework.schedule.analysis.validate import check
from pipework.schedule.checks import checked_skips, refuse_kind
from pipework.schedule.costs import Costs, checked
from pipework.schedule.passes.posting import posted, timed_for_posting
from pipework.schedule.schedule import Schedule


def with_skips(schedule: Schedule, skips: Iterable[tuple[int, int]]) -> Schedule:
    """Tell a schedule of skip connections: values that one stage hands to a later one, past those between.

    The forward of stage t then needs that of stage s as well, and the backward of s that of t. A skip to the next stage
    travels with the value that goes there anyway, and one within a stage does not travel; both are left out.

    Args:
        schedule: one without transfers.
        skips: (s, t) pairs of stages; the same pair several times counts once, also if the schedule has it already.

    Returns:
        A schedule with the same orders, and all skips in ascending order.

    Raises:
        ValueError: a stage that does not exist, a skip that goes back, or a schedule with transfers.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> with_skips(fill_drain(4, 2), [(0, 3), (1, 2), (0, 3)]).skips
        ((0, 3),)
    """
    _refuse_lowered(schedule, "the skips come before")
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
    """Put a ``SEND`` and a ``RECV`` among the actions for everything that goes from one worker to another.

    A send stands right behind the action that makes its value; it is posted, and nobody waits for it. A receive is
    posted ahead of the action that needs it, in the order in which the peer sends: before the action during which, with
    these costs, the value is sent, and at least one action ahead. A boundary, or a skip, between two stages of one
    worker transfers nothing.

    ``channel="worker"`` is for transports in which all transfers of a worker share one queue (one communicator): there
    the receive stands exactly where the time of its send tells, so that no two workers ever wait for each other. Such
    orders run on the other channels as well.

    Args:
        schedule: a valid one, without transfers; recomputation, if any, has been added.
        costs: times; unit costs if None. They decide where receives stand, not whether the result can be executed.
        channel: what will carry the transfers, see :mod:`pipework.schedule.analysis.channels`.

    Returns:
        The schedule with transfers; the computation keeps its order.

    Raises:
        ScheduleError: the schedule cannot be executed.
        ValueError: it has transfers already, an unknown channel, or costs for other stages.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> [str(action) for action in with_communication(fill_drain(2, 1)).orders[1]]
        ['1RECV_F0', '1F0', '1B0', '1SEND_B0']
    """
    check_channel(channel)
    _refuse_lowered(schedule, "they are added once")
    costs = checked(costs)
    spread = costs.spread(schedule.stages, len(schedule.skips))
    check(schedule)
    lowered = posted(schedule, timed_for_posting(schedule, spread), channel)
    check(lowered, channel=channel)
    return lowered


def with_gradient_reduction(schedule: Schedule) -> Schedule:
    """Put a ``REDUCE_GRAD`` behind the last action that adds to a stage's gradient, for every stage.

    There the gradients can be added up over replicas of the model (data parallelism) while the worker goes on with
    other stages, and while other workers still drain the pipe.

    Args:
        schedule: a valid one that trains, without reductions.

    Raises:
        ScheduleError: the schedule cannot be executed.
        ValueError: it has reductions already, or no gradients.

    Example:
        >>> from pipework.schedule import looped_bfs
        >>> [str(action) for action in with_gradient_reduction(looped_bfs(1, 1, 2)).orders[0]]
        ['0F0', '1F0', '1B0', '1REDUCE_GRAD', '0B0', '0REDUCE_GRAD']
    """
    if schedule.inference:
        raise ValueError(f"schedule {schedule.name!r} has no backwards, so there are no gradients to reduce")
    refuse_kind(schedule, "REDUCE_GRAD", "reduces")
    check(schedule)
    reducing = replace(schedule, orders=tuple(tuple(_reduced(order)) for order in schedule.orders))
    check(reducing)
    return reducing


def _reduced(order: Iterable[Action]) -> Iterator[Action]:
    order = tuple(order)
    last = {action.stage: position for position, action in enumerate(order) if action.kind in ("B", "I", "W")}
    ready: list[int] = []
    for position, action in enumerate(order):
        if not action.kind.startswith("SEND"):  # which somebody waits for
            yield from (Action("REDUCE_GRAD", stage) for stage in ready)
            ready.clear()
        yield action
        if last.get(action.stage) == position:
            ready.append(action.stage)
    yield from (Action("REDUCE_GRAD", stage) for stage in ready)


def _refuse_lowered(schedule: Schedule, why: str) -> None:
    if schedule.communicates:
        raise ValueError(f"schedule {schedule.name!r} has transfers among its actions already: {why}")
