"""Where sends and receives stand among a worker's actions."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import NamedTuple

from pipework.schedule.action import KINDS, Action
from pipework.schedule.channels import Channel
from pipework.schedule.costs import StageCosts
from pipework.schedule.edges import Message, crossings
from pipework.schedule.events import run
from pipework.schedule.schedule import Schedule


class _Sent(NamedTuple):
    """A message, in the order in which messages are sent."""

    time: float
    message: Message


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
    times = run(schedule, _a_hair_longer(costs)).times
    at = {
        action: (worker, position)
        for worker, order in enumerate(schedule.orders)
        for position, action in enumerate(order)
    }
    # Reductions have times of their own, beside the computation. Where a computation begins, transfers stand right
    # behind the one before.
    computing = [[n for n, action in enumerate(order) if action.kind in KINDS] for order in schedule.orders]
    starts = [[times[worker][n][0] for n in positions] for worker, positions in enumerate(computing)]
    begins = [[0, *(position + 1 for position in positions)] for positions in computing]

    def where(kind: str, stage: int, micro_batch: int) -> tuple[int, int]:
        plain = Action(kind, stage, micro_batch)
        return at[plain] if plain in at else at[Action("I", stage, micro_batch)]

    sent = []
    for route in crossings(schedule):
        for micro_batch in range(schedule.micro_batches):
            worker, position = where(route.kind, route.source, micro_batch)
            sent.append(_Sent(times[worker][position][1], route.message(micro_batch)))
    sent.sort()

    # For each worker, what stands before each position; and the position before which its latest transfer stands.
    slots: list[list[list[Action]]] = [[[] for _ in range(len(order) + 1)] for order in schedule.orders]
    latest = [0] * schedule.workers
    receives: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    for time, message in sent:
        sender, made = where(message.kind, message.source, message.micro_batch)
        receiver, used = where(message.kind, message.target, message.micro_batch)
        slot = begins[receiver][max(0, bisect_right(starts[receiver], time) - 1)]
        slots[sender][made + 1].append(message.send)
        latest[sender] = made + 1
        if channel == "worker":
            # A worker that waits meanwhile: behind the action that it has ended, and behind what that sends.
            latest[receiver] = slot = max(slot, latest[receiver])
            slots[receiver][slot].append(message.receive)
        else:
            receives.setdefault((sender, receiver), []).append((min(slot, max(0, used - 1)), message.receive))
    for (_, receiver), row in receives.items():
        # What is received early needs all that was sent before it to be received no later.
        slot = len(slots[receiver])
        for wanted, receive in reversed(row):
            slot = min(slot, wanted)
            slots[receiver][slot].insert(0, receive)
    orders = tuple(
        (*(step for before, action in zip(slot, order, strict=False) for step in (*before, action)), *slot[-1])
        for slot, order in zip(slots, schedule.orders, strict=True)
    )
    return replace(schedule, orders=orders)


def _a_hair_longer(costs: StageCosts) -> StageCosts:
    """Costs of which no action takes no time, so that what depends on an action comes later than it."""
    hair = 1e-6 * (max(max(times) for times in costs.duration.values()) or 1.0)
    longer = {kind: tuple(time + hair for time in times) for kind, times in costs.duration.items()}
    return costs._replace(duration=longer)
