"""Where the weights of a stage are gathered, and freed again, if processes share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipework.schedule.action import Action
from pipework.schedule.analysis.validate import check
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.kinds import Kinds
from pipework.schedule.schedule import Schedule


def with_sharding(schedule: Schedule, whole_stages: int) -> Schedule:
    """Adds ``UNSHARD`` and ``RESHARD``, so that a worker has the weights of a few of its stages at a time.

    These are the stages that it needs next. So the weights of a stage are gathered once for a stretch of work, before
    the worker comes to it if `whole_stages` is more than 1, and not for each micro-batch.

    Args:
        schedule: one without such actions.
        whole_stages: how many stages of a worker are whole at most.

    Returns:
        The schedule with these actions; one in which a worker has no more stages than that gathers each once.

    Raises:
        ValueError: `whole_stages` is less than 1.
        ScheduleError: the schedule cannot run.

    Example:
        >>> from pipework.schedule import looped_bfs
        >>> " ".join(map(str, with_sharding(looped_bfs(1, 1, 2), 1).orders[0]))
        '0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD'
    """
    positive_integers(whole_stages=whole_stages)
    orders = tuple(sharded_order(order, whole_stages, schedule.table) for order in schedule.orders)
    sharded = replace(schedule, orders=orders)
    check(sharded)
    return sharded


def sharded_order(order: Sequence[Action], whole_stages: int, table: Kinds) -> tuple[Action, ...]:
    """The actions of one worker with ``UNSHARD`` and ``RESHARD`` among them; see `with_sharding`."""
    reading = table.letters(reads=True)
    found: list[Action] = []
    whole: list[int] = []
    for action, stages in zip(order, _stages_read_next(order, reading), strict=True):
        wanted = stages[:whole_stages] if action.kind in reading else whole
        found += [Action("RESHARD", stage) for stage in whole if stage not in wanted]
        found += [Action("UNSHARD", stage) for stage in wanted if stage not in whole]
        whole = [*(stage for stage in whole if stage in wanted), *(stage for stage in wanted if stage not in whole)]
        found.append(action)
    return (*found, *(Action("RESHARD", stage) for stage in whole))


def _stages_read_next(order: Sequence[Action], reading: Sequence[str]) -> list[tuple[int, ...]]:
    """For each action the stages whose weights it and later ones read, those that are read first in front."""
    found: list[tuple[int, ...]] = []
    stages: tuple[int, ...] = ()
    for action in reversed(order):
        if action.kind in reading and stages[:1] != (action.stage,):
            stages = (action.stage, *(stage for stage in stages if stage != action.stage))
        found.append(stages)
    return found[::-1]
