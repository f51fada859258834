"""Channels: what carries values from worker to worker, in three models of what real transports promise.

A worker posts its sends and receives in the order in which they stand among its actions, and never waits for one; only
an action that needs what is received waits. What differs is which of them may happen when:

* ``"unbounded"``: each message has a channel of its own, which holds it until somebody asks. A transfer begins when it
  is sent.
* ``"pair"``: one channel for each ordered pair of workers. The first message sent must be the first received, and so
  on; a transfer begins when both have been posted and the one before it is over.
* ``"worker"``: one channel for each worker, for all that it sends and receives, as with one communicator. A transfer
  begins when it is at the head of both workers' queues. A receive that is posted early holds up the sends behind it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Literal, NamedTuple, Protocol, get_args

Channel = Literal["unbounded", "pair", "worker"]
"""The name of a model of channels."""

Message = tuple[int, int]
"""A route, by its number, and a micro-batch."""


class Way(NamedTuple):
    """What is known of a route between workers before anything is sent.

    Attributes:
        number: of the route.
        sender: the worker that sends.
        receiver: the worker that receives.
        delay: how long a transfer takes.
    """

    number: int
    sender: int
    receiver: int
    delay: float


class Transfer(NamedTuple):
    """A message that has come across.

    Attributes:
        message: which.
        start: when it began.
        end: when it was there.
        cause: what it waited for last: True, the sender; False, the receiver; or the transfer before it.
    """

    message: Message
    start: float
    end: float
    cause: bool | Message


class Channels(Protocol):
    """All channels of a run."""

    def post(self, way: Way, micro_batch: int, time: float, *, sends: bool) -> list[Transfer]:
        """Notes one side's wish to transfer a message; returns the transfers that now can take place."""


def channels(channel: Channel) -> Channels:
    """Empty channels of a model.

    Raises:
        ValueError: no such model.

    Example:
        >>> channels("bounded")
        Traceback (most recent call last):
        ValueError: channel is 'bounded': wanted one of 'unbounded', 'pair', 'worker'
    """
    check_channel(channel)
    models: dict[str, type[Channels]] = {"unbounded": _Unbounded, "pair": _Pair, "worker": _Worker}
    return models[channel]()


def check_channel(channel: str) -> None:
    """Refuse what names no model.

    Raises:
        ValueError: no such model.
    """
    if channel not in get_args(Channel):
        raise ValueError(f"channel is {channel!r}: wanted one of {', '.join(map(repr, get_args(Channel)))}")


class _Unbounded:
    def post(self, way: Way, micro_batch: int, time: float, *, sends: bool) -> list[Transfer]:
        number, _, _, delay = way
        return [Transfer((number, micro_batch), time, time + delay, True)] if sends else []


_Wish = tuple[Message, float, Way]
"""What one side wants to transfer, and since when."""


class _Queue:
    """The priorities in a queue, when its last transfer was over, and which that was."""

    __slots__ = ("free", "last", "priorities")

    def __init__(self) -> None:
        self.priorities: deque[_Wish] = deque()
        self.free = 0.0
        self.last: Message | None = None


def _carried(sent: _Wish, wanted: _Wish, *queues: _Queue) -> Transfer:
    """The transfer of what both sides wish, which keeps these queues busy."""
    message, start, way = sent
    cause: bool | Message = True
    if wanted[1] > start:
        start, cause = wanted[1], False
    for queue in queues:
        if queue.free > start and queue.last is not None:
            start, cause = queue.free, queue.last
    end = start + way.delay
    for queue in queues:
        queue.free, queue.last = end, message
    return Transfer(message, start, end, cause)


class _Pair:
    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], _Queue] = defaultdict(_Queue)
        self._wanted: dict[tuple[int, int], deque[_Wish]] = defaultdict(deque)

    def post(self, way: Way, micro_batch: int, time: float, *, sends: bool) -> list[Transfer]:
        number, sender, receiver, _ = way
        queue, wanted = self._sent[sender, receiver], self._wanted[sender, receiver]
        sent = queue.priorities
        (sent if sends else wanted).append(((number, micro_batch), time, way))
        done = []
        while sent and wanted and sent[0][0] == wanted[0][0]:
            done.append(_carried(sent.popleft(), wanted.popleft(), queue))
        return done


class _Worker:
    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = defaultdict(_Queue)

    def post(self, way: Way, micro_batch: int, time: float, *, sends: bool) -> list[Transfer]:
        own = way.sender if sends else way.receiver
        self._queues[own].priorities.append(((way.number, micro_batch), time, way))
        done = []
        changed = [own]
        while changed:
            head = self._queues[changed.pop()].priorities
            if not head:
                continue
            _, sending, receiving, _ = head[0][2]
            sender, receiver = self._queues[sending], self._queues[receiving]
            if sender.priorities and receiver.priorities and sender.priorities[0][0] == receiver.priorities[0][0]:
                changed += sending, receiving
                done.append(_carried(sender.priorities.popleft(), receiver.priorities.popleft(), sender, receiver))
        return done
