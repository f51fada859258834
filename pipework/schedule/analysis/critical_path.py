"""The critical path: the chain of actions that determines the makespan."""

from __future__ import annotations

from pipework.schedule.action import Action
from pipework.schedule.analysis.events import Run, previous_computation
from pipework.schedule.edges import counterpart, maker
from pipework.schedule.schedule import Schedule


def critical_path(schedule: Schedule, ended: Run) -> tuple[tuple[int, int], ...]:
    """Follow causes back from the action that ends last.

    Returns:
        The worker of each action of the path and its position in the worker's order: computations, transfers and
        reductions in order of time.

    Example:
        >>> from pipework.schedule import Costs, fill_drain
        >>> from pipework.schedule.analysis.events import run
        >>> schedule = fill_drain(2, 2)
        >>> path = critical_path(schedule, run(schedule, Costs().spread(2)))
        >>> [str(schedule.orders[worker][position]) for worker, position in path]
        ['0F0', '1F0', '1F1', '1B0', '0B0', '0B1']
    """
    path = []
    where: tuple[int, int] | None = _last(schedule, ended)
    while where is not None:
        path.append(where)
        worker, position = where
        action = schedule.orders[worker][position]
        cause = ended.cause(action, worker, position)
        if action.peer >= 0 and cause is not None and cause in (action, counterpart(action)):
            worker, position = _place(schedule, cause)  # the side that was posted last, after the computation before it
            cause = None
        where = _computation_before(schedule, worker, position) if cause is None else _place(schedule, cause)
    return tuple(reversed(path))


def _last(schedule: Schedule, ended: Run) -> tuple[int, int]:
    """The place of the action that ends last."""
    after_others = schedule.table.letters(scope="stage", beside=False)
    ends = (
        (end, position, -worker)
        for worker, (order, times) in enumerate(zip(schedule.orders, ended.ends, strict=True))
        for position, (action, end) in enumerate(zip(order, times, strict=True))
        if action[0] not in after_others
    )
    _, position, worker = max(ends)
    return -worker, position


def _place(schedule: Schedule, made: Action) -> tuple[int, int]:
    """The worker and position of an action, or of what makes a product."""
    worker = schedule.placement[made.stage]
    order = schedule.orders[worker]
    return worker, order.index(maker(made, order, schedule.table))


def _computation_before(schedule: Schedule, worker: int, position: int) -> tuple[int, int] | None:
    before = previous_computation(schedule, worker, position)
    return None if before is None else (worker, before)
