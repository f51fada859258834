"""Positions of sends and receives in the orders."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from pipework.schedule.action import Action
from pipework.schedule.analysis.channels import Channel
from pipework.schedule.analysis.events import Run, run
from pipework.schedule.costs import StageCosts
from pipework.schedule.edges import Route, crossings
from pipework.schedule.schedule import Schedule

_Slots = list[list[list[Action]]]
"""For each worker, the transfers before each position of its order, and after the last one."""


def timed_for_posting(schedule: Schedule, costs: StageCosts) -> Run:
    """Run a schedule for the times that decide the positions of its transfers.

    Every action takes a tiny bit longer, so that each takes time and its dependents start after it.
    """
    timed = {row.cost for row in schedule.table.values() if row.cost and row.scope not in ("transfer", "copy")}
    extra = 1e-6 * (max(max(costs[name]) for name in timed) or 1.0)
    longer = {name: tuple(time + extra for time in costs[name]) for name in timed}
    return run(schedule, {**costs, **longer})


def posted(schedule: Schedule, timed: Run, channel: Channel) -> Schedule:
    """Add all transfers to a schedule.

    A send comes right after the action that makes its value. A receive comes before the action that runs when the value
    is sent: early enough to cost no time, and late enough to hold no buffer in vain.

    With one channel for each worker, two workers whose transfers have different orders may deadlock. So all sends and
    receives of all workers follow the order of the send times exactly. On the other channels, a receive comes at least
    one action early, in case that real times differ.

    Args:
        schedule: a valid schedule without transfers.
        timed: its run by :func:`timed_for_posting`.
        channel: the transport of the transfers.
    """
    execution = _Execution(schedule, timed)
    slots: _Slots = [[[] for _ in range(len(order) + 1)] for order in schedule.orders]
    if channel == "worker":
        _post_in_one_order(execution, slots)
    else:
        _post_in_the_senders_order(execution, slots)
    orders = tuple(
        (*(step for before, action in zip(slot, order, strict=False) for step in (*before, action)), *slot[-1])
        for slot, order in zip(slots, schedule.orders, strict=True)
    )
    return replace(schedule, orders=orders)


class _Sent(NamedTuple):
    """A message, in the order in which messages are sent.

    Attributes:
        time: when it is sent.
        route: the route of its value or gradient.
        micro_batch: the micro-batch of its value or gradient.
        made: position of the action that makes the value, in the sender's order.
        used: position of the action that needs the value, in the receiver's order.
    """

    time: float
    route: Route
    micro_batch: int
    made: int
    used: int


class _Execution:
    """Times and positions of all actions if no transfer waits."""

    def __init__(self, schedule: Schedule, timed: Run) -> None:
        # The positions of forwards and backwards; and those of all computations, since reductions run beside them.
        table = schedule.table
        at: dict[str, list[list[int]]] = {
            kind: [[0] * schedule.micro_batches for _ in schedule.placement] for kind in "FB"
        }
        ways = {letter: row.gives for letter, row in table.items() if row.gives in at}
        computing: list[list[int]] = [[] for _ in schedule.orders]
        for worker, order in enumerate(schedule.orders):
            for position, action in enumerate(order):
                kind, stage, micro_batch, _ = action
                if table[kind].scope == "micro-batch":
                    computing[worker].append(position)
                if kind in ways:
                    at[ways[kind]][stage][micro_batch] = position
        self._starts = [[timed.starts[worker][n] for n in row] for worker, row in enumerate(computing)]
        # Transfers before a computation come right after the computation before it.
        self._begins = [[0, *(position + 1 for position in row)] for row in computing]
        self.placement = schedule.placement
        self.workers = schedule.workers
        self.sent: list[_Sent] = []
        for route in crossings(schedule):
            kind, source, target, _ = route
            ends = timed.ends[schedule.placement[source]]
            made, used = at[kind][source], at[kind][target]
            for micro_batch, (before, behind) in enumerate(zip(made, used, strict=True)):
                self.sent.append(_Sent(ends[before], route, micro_batch, before, behind))
        # Messages of the same time may have any order, if it is the same for all workers.
        self.sent.sort(key=itemgetter(0))

    def slot(self, worker: int, time: float) -> int:
        """The position of the action that a worker runs at a time, or ran last."""
        return self._begins[worker][max(0, bisect_right(self._starts[worker], time) - 1)]


def _post_in_one_order(execution: _Execution, slots: _Slots) -> None:
    """Adds the sends and receives of all workers in the order of the send times."""
    latest = [0] * execution.workers
    place = execution.placement
    for time, route, micro_batch, made, _ in execution.sent:
        sender, receiver = place[route.source], place[route.target]
        slots[sender][made + 1].append(route.send(micro_batch))
        latest[sender] = made + 1
        # If the receiver is idle then: after its last action, and after the sends of that action.
        latest[receiver] = slot = max(execution.slot(receiver, time), latest[receiver])
        slots[receiver][slot].append(route.receive(micro_batch))


def _post_in_the_senders_order(execution: _Execution, slots: _Slots) -> None:
    """Adds sends right after their actions, and the receives from each worker in the order of its sends."""
    receives: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    place = execution.placement
    for time, route, micro_batch, made, used in execution.sent:
        sender, receiver = place[route.source], place[route.target]
        slots[sender][made + 1].append(route.send(micro_batch))
        slot = min(execution.slot(receiver, time), max(0, used - 1))
        receives.setdefault((sender, receiver), []).append((slot, route.receive(micro_batch)))
    for (_, receiver), row in receives.items():
        # A receive must not come before receives of messages that were sent earlier.
        earliest = list(accumulate((slot for slot, _ in reversed(row)), min))[::-1]
        for slot, (_, receive) in zip(earliest, row, strict=True):
            slots[receiver][slot].append(receive)
