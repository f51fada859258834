"""The event-driven run of a schedule: every worker starts its next action as soon as its data is there.

Validation asks it whether the schedule ends, simulation when. A worker that cannot go on is parked under the one
product it misses and woken when that is made, so the work is linear in the number of actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pipework.schedule.action import Action
from pipework.schedule.costs import StageCosts
from pipework.schedule.edges import needs, product, recomputed
from pipework.schedule.schedule import Schedule

LOSS: Final = Action("loss", -1, -1)
"""The product that all actions but forwards need if the loss is computed outside of the pipe."""


class Stuck(NamedTuple):
    """A worker that waits for ever: for which action, and what that misses."""

    worker: int
    action: Action
    missing: Action


@dataclass(frozen=True)
class Run:
    """What happened.

    Attributes:
        times: (start, end) of each worker's actions, in its order; shorter than the order where the worker is stuck.
        stuck: the workers that wait for ever.
    """

    times: tuple[tuple[tuple[float, float], ...], ...]
    stuck: tuple[Stuck, ...]


def run(schedule: Schedule, costs: StageCosts, *, loss_outside: bool = False) -> Run:
    """Execute a schedule with given times, on channels that hold any number of values.

    Args:
        schedule: each of its actions stands once; the order may be impossible.
        costs: times, spelt out for the schedule's stages.
        loss_outside: no action but forwards starts before all forwards of all workers have ended.

    Example:
        >>> from pipework.schedule import Costs, fill_drain
        >>> run(fill_drain(2, 1), Costs().spread(stages=2)).times[0]
        ((0.0, 1.0), (4.0, 6.0))
    """
    placement, orders = schedule.placement, schedule.orders
    checkpointed = recomputed(schedule)
    forwards = sum(action.kind == "F" for order in orders for action in order)
    ready: dict[Action, float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in orders]
    parked: dict[Action, list[int]] = {}
    awake = list(range(schedule.workers))[::-1]

    def start_time(action: Action, worker: int) -> float | Action:
        """When the action may start, or the product that it misses."""
        start = times[worker][-1][1] if times[worker] else 0.0
        for needed in needs(action, schedule.stages, checkpointed):
            arrival = ready.get(needed)
            if arrival is None:
                return needed
            if placement[needed.stage] != worker:
                arrival += costs.transfer[min(needed.stage, action.stage)]
            start = max(start, arrival)
        if loss_outside and action.kind != "F":
            return max(start, ready[LOSS]) if LOSS in ready else LOSS
        return start

    def finish(made: Action, end: float) -> None:
        ready[made] = end
        awake.extend(parked.pop(made, ()))

    while awake:
        worker = awake.pop()
        order = orders[worker]
        while len(times[worker]) < len(order):
            action = order[len(times[worker])]
            start = start_time(action, worker)
            if isinstance(start, Action):
                parked.setdefault(start, []).append(worker)
                break
            end = start + costs.duration[action.kind][action.stage]
            times[worker].append((start, end))
            finish(product(action), end)
            if action.kind == "F":
                forwards -= 1
                if not forwards:
                    finish(LOSS, max(last[1] for done in times for last in done[-1:]))
    stuck = [
        Stuck(worker, orders[worker][len(times[worker])], missing)
        for missing, workers in parked.items()
        for worker in workers
    ]
    return Run(tuple(map(tuple, times)), tuple(sorted(stuck)))
