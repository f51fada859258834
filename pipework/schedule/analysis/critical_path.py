"""The critical path: the chain of actions that determines the makespan."""

from __future__ import annotations

from pipework.schedule.action import KINDS, Action
from pipework.schedule.analysis.events import Run
from pipework.schedule.edges import counterpart
from pipework.schedule.schedule import Schedule


def critical_path(schedule: Schedule, ended: Run) -> tuple[Action, ...]:
    """Follow causes back from the action that ends last.

    Returns:
        Computations, transfers and reductions in order of time.

    Example:
        >>> from pipework.schedule import Costs, fill_drain
        >>> from pipework.schedule.analysis.events import run
        >>> schedule = fill_drain(2, 2)
        >>> [str(action) for action in critical_path(schedule, run(schedule, Costs().spread(2)))]
        ['0F0', '1F0', '1F1', '1B0', '0B0', '0B1']
    """
    place = {
        action: (worker, position)
        for worker, order in enumerate(schedule.orders)
        for position, action in enumerate(order)
    }
    last = max(
        (where for action, where in place.items() if action.kind not in ("UNSHARD", "RESHARD")),
        key=lambda where: (ended.times[where[0]][where[1]][1], where[1]),
    )
    path = []
    where: tuple[int, int] | None = last
    while where is not None:
        worker, position = where
        action = schedule.orders[worker][position]
        path.append(action)
        cause = ended.cause(action, worker, position)
        if action.peer >= 0 and cause is not None and cause in (action, counterpart(action)):
            worker, position = place[cause]  # the side that was posted last, after the computation before it
            cause = None
        if cause is None:
            where = _computation_before(schedule, worker, position)
        else:
            # The product of a B has the name of an I.
            where = place.get(cause) or place[Action("B", cause.stage, cause.micro_batch)]
    return tuple(reversed(path))


def _computation_before(schedule: Schedule, worker: int, position: int) -> tuple[int, int] | None:
    order = schedule.orders[worker]
    return next(((worker, n) for n in range(position - 1, -1, -1) if order[n].kind in KINDS), None)
