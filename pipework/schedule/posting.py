"""Where sends and receives stand among a worker's actions."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from pipework.schedule.action import KINDS, Action
from pipework.schedule.channels import Channel
from pipework.schedule.costs import StageCosts
from pipework.schedule.edges import Message, crossings
from pipework.schedule.events import run
from pipework.schedule.schedule import Schedule

_Slots = list[list[list[Action]]]
"""For each worker, what stands before each position of its order; and behind the last."""


def posted(schedule: Schedule, costs: StageCosts, channel: Channel) -> Schedule:
    """Put all transfers among the actions.

    A send stands right behind the action that makes its value. A receive stands before the action during which, with
    these costs, the value is sent: early enough to cost no time, and late enough not to keep a buffer for nothing.

    One channel for each worker needs more care: if the transfers of two workers stand in different orders, each may
    wait for the other for ever. There the receive stands where the time of its send tells, exactly, so that all workers
    have their transfers in the order of these times. The other channels ask for less: there, a receive stands at least
    one action ahead, in case that times turn out otherwise.

    Args:
        schedule: one that can be executed, without transfers.
        costs: times, spelt out for the schedule.
        channel: what will carry the transfers.
    """
    execution = _Execution(schedule, costs)
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
        message: which.
        made: worker and position of the action that makes it.
        used: worker and position of the action that needs it.
    """

    time: float
    message: Message
    made: tuple[int, int]
    used: tuple[int, int]


class _Execution:
    """When everything happens if transfers wait for nothing."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self._times = run(schedule, _a_hair_longer(costs)).times
        self._at = {
            action: (worker, position)
            for worker, order in enumerate(schedule.orders)
            for position, action in enumerate(order)
        }
        # Reductions have times of their own, beside the computation.
        computing = [[n for n, action in enumerate(order) if action.kind in KINDS] for order in schedule.orders]
        self._starts = [[self._times[worker][n][0] for n in positions] for worker, positions in enumerate(computing)]
        # Where a computation begins, transfers stand right behind the one before.
        self._begins = [[0, *(position + 1 for position in positions)] for positions in computing]
        self.workers = schedule.workers
        self.sent = sorted(
            self._sent(route.message(micro_batch))
            for route in crossings(schedule)
            for micro_batch in range(schedule.micro_batches)
        )

    def slot(self, worker: int, time: float) -> int:
        """The position of the action that a worker runs, or has just run, at a time."""
        return self._begins[worker][max(0, bisect_right(self._starts[worker], time) - 1)]

    def _sent(self, message: Message) -> _Sent:
        made = self._where(message.kind, message.source, message.micro_batch)
        used = self._where(message.kind, message.target, message.micro_batch)
        worker, position = made
        return _Sent(self._times[worker][position][1], message, made, used)

    def _where(self, kind: str, stage: int, micro_batch: int) -> tuple[int, int]:
        plain = Action(kind, stage, micro_batch)
        return self._at[plain] if plain in self._at else self._at[Action("I", stage, micro_batch)]


def _post_in_one_order(execution: _Execution, slots: _Slots) -> None:
    """Sends and receives of all workers in the order of the sends."""
    latest = [0] * execution.workers
    for time, message, (sender, made), (receiver, _) in execution.sent:
        slots[sender][made + 1].append(message.send)
        latest[sender] = made + 1
        # A worker that waits meanwhile: behind the action that it has ended, and behind what that sends.
        latest[receiver] = slot = max(execution.slot(receiver, time), latest[receiver])
        slots[receiver][slot].append(message.receive)


def _post_in_the_senders_order(execution: _Execution, slots: _Slots) -> None:
    """Sends as they are made; receives from each worker in the order in which it sends."""
    receives: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    for time, message, (sender, made), (receiver, used) in execution.sent:
        slots[sender][made + 1].append(message.send)
        slot = min(execution.slot(receiver, time), max(0, used - 1))
        receives.setdefault((sender, receiver), []).append((slot, message.receive))
    for (_, receiver), row in receives.items():
        # What is received early needs all that was sent before it to be received no later.
        earliest = list(accumulate((slot for slot, _ in reversed(row)), min))[::-1]
        for slot, (_, receive) in zip(earliest, row, strict=True):
            slots[receiver][slot].append(receive)


def _a_hair_longer(costs: StageCosts) -> StageCosts:
    """Costs of which no action takes no time, so that what depends on an action comes later than it."""
    hair = 1e-6 * (max(max(times) for times in costs.duration.values()) or 1.0)
    longer = {kind: tuple(time + hair for time in times) for kind, times in costs.duration.items()}
    return costs._replace(duration=longer)
