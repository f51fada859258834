"""Where sends and receives stand among a worker's actions."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from pipework.schedule.action import KINDS, Action
from pipework.schedule.analysis.channels import Channel
from pipework.schedule.analysis.events import Run, run
from pipework.schedule.costs import StageCosts
from pipework.schedule.edges import Route, crossings
from pipework.schedule.schedule import Schedule

_Slots = list[list[list[Action]]]
"""For each worker, what stands before each position of its order; and behind the last."""


def timed_for_posting(schedule: Schedule, costs: StageCosts) -> Run:
    """The run of a schedule that tells where its transfers stand.

    Every action takes a hair longer, so that none takes no time, and what depends on an action comes later than it.
    """
    hair = 1e-6 * (max(max(times) for times in costs.duration.values()) or 1.0)
    longer = {kind: tuple(time + hair for time in times) for kind, times in costs.duration.items()}
    return run(schedule, costs._replace(duration=longer))


def posted(schedule: Schedule, timed: Run, channel: Channel) -> Schedule:
    """Put all transfers among the actions.

    A send stands right behind the action that makes its value. A receive stands before the action during which the
    value is sent: early enough to cost no time, and late enough not to keep a buffer for nothing.

    One channel for each worker needs more care: if the transfers of two workers stand in different orders, each may
    wait for the other for ever. There the receive stands where the time of its send tells, exactly, so that all workers
    have their transfers in the order of these times. The other channels ask for less: there, a receive stands at least
    one action ahead, in case that times turn out otherwise.

    Args:
        schedule: one that can be executed, without transfers.
        timed: what :func:`timed_for_posting` says of it.
        channel: what will carry the transfers.
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
        time: when.
        route: on which way.
        micro_batch: of which piece of the mini-batch.
        made: the position of the action that makes it, in the sender's order.
        used: the position of the action that needs it, in the receiver's order.
    """

    time: float
    route: Route
    micro_batch: int
    made: int
    used: int


class _Execution:
    """When everything happens if transfers wait for nothing."""

    def __init__(self, schedule: Schedule, timed: Run) -> None:
        # Where forwards and backwards stand, and where computations do: reductions have times of their own, beside.
        at: dict[str, list[list[int]]] = {
            kind: [[0] * schedule.micro_batches for _ in schedule.placement] for kind in "FB"
        }
        computing: list[list[int]] = [[] for _ in schedule.orders]
        for worker, order in enumerate(schedule.orders):
            for position, (kind, stage, micro_batch, _) in enumerate(order):
                if kind in KINDS:
                    computing[worker].append(position)
                if kind in "FBI":
                    at["F" if kind == "F" else "B"][stage][micro_batch] = position
        self._starts = [[timed.times[worker][n][0] for n in row] for worker, row in enumerate(computing)]
        # Where a computation begins, transfers stand right behind the one before.
        self._begins = [[0, *(position + 1 for position in row)] for row in computing]
        self.placement = schedule.placement
        self.workers = schedule.workers
        self.sent: list[_Sent] = []
        for route in crossings(schedule):
            kind, source, target, _ = route
            times = timed.times[schedule.placement[source]]
            made, used = at[kind][source], at[kind][target]
            for micro_batch, (before, behind) in enumerate(zip(made, used, strict=True)):
                self.sent.append(_Sent(times[before][1], route, micro_batch, before, behind))
        # What is sent at the same time may be in any order, as long as it is the same for all.
        self.sent.sort(key=itemgetter(0))

    def slot(self, worker: int, time: float) -> int:
        """The position of the action that a worker runs, or has just run, at a time."""
        return self._begins[worker][max(0, bisect_right(self._starts[worker], time) - 1)]


def _post_in_one_order(execution: _Execution, slots: _Slots) -> None:
    """Sends and receives of all workers in the order of the sends."""
    latest = [0] * execution.workers
    place = execution.placement
    for time, route, micro_batch, made, _ in execution.sent:
        sender, receiver = place[route.source], place[route.target]
        slots[sender][made + 1].append(route.send(micro_batch))
        latest[sender] = made + 1
        # A worker that waits meanwhile: behind the action that it has ended, and behind what that sends.
        latest[receiver] = slot = max(execution.slot(receiver, time), latest[receiver])
        slots[receiver][slot].append(route.receive(micro_batch))


def _post_in_the_senders_order(execution: _Execution, slots: _Slots) -> None:
    """Sends as they are made; receives from each worker in the order in which it sends."""
    receives: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    place = execution.placement
    for time, route, micro_batch, made, used in execution.sent:
        sender, receiver = place[route.source], place[route.target]
        slots[sender][made + 1].append(route.send(micro_batch))
        slot = min(execution.slot(receiver, time), max(0, used - 1))
        receives.setdefault((sender, receiver), []).append((slot, route.receive(micro_batch)))
    for (_, receiver), row in receives.items():
        # What is received early needs all that was sent before it to be received no later.
        earliest = list(accumulate((slot for slot, _ in reversed(row)), min))[::-1]
        for slot, (_, receive) in zip(earliest, row, strict=True):
            slots[receiver][slot].append(receive)
