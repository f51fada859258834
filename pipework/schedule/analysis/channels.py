"""Channels: three models of the order that transports between workers guarantee.

A worker posts its sends and receives in the order of its actions and never waits for them; only an action that needs a
received value waits. The models differ in when a transfer begins:

* ``"unbounded"``: each message has its own channel, which stores it until it is received. A transfer begins when it is
  sent.
* ``"pair"``: one channel for each ordered pair of workers. Messages are received in the order in which they are sent; a
  transfer begins when both sides have posted it and the transfer before it has ended.
* ``"worker"``: one channel for all sends and receives of a worker, as with one communicator. A transfer begins when it
  is at the head of both workers' queues. A receive that is posted early delays the sends after it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Literal, NamedTuple, Protocol, get_args

from pipework.schedule.argument_checks import one_of

Channel = Literal["unbounded", "pair", "worker"]
"""The name of a model of channels."""

Message = tuple[int, int]
"""The number of a route, and a micro-batch."""


class WorkerRoute(NamedTuple):
    """A route between two workers.

    Attributes:
        number: of the route.
        sender: the worker that sends.
        receiver: the worker that receives.
        delay: time of a transfer.
    """

    number: int
    sender: int
    receiver: int
    delay: float


class Transfer(NamedTuple):
    """The transfer of a message.

    Attributes:
        message: the message.
        start: when it began.
        end: when it ended.
        cause: the last thing that it waited for: True for the sender, False for the receiver, or the transfer before
            it.
    """

    message: Message
    start: float
    end: float
    cause: bool | Message


class Channels(Protocol):
    """The channels of a run."""

    def post(self, route: WorkerRoute, micro_batch: int, time: float, *, sends: bool) -> list[Transfer]:
        """Posts one side of a transfer; returns the transfers that can now take place."""


def channels(channel: Channel) -> Channels:
    """Make the channels of a model.

    Raises:
        ValueError: there is no such model.

    Example:
        >>> channels("bounded")
        Traceback (most recent call last):
        ValueError: channel is 'bounded': wanted one of 'unbounded', 'pair', 'worker'
    """
    check_channel(channel)
    models: dict[str, type[Channels]] = {"unbounded": _Unbounded, "pair": _Pair, "worker": _Worker}
    return models[channel]()


def check_channel(channel: str) -> None:
    """Refuse the name of an unknown model.

    Raises:
        ValueError: there is no such model.
    """
    one_of("channel", channel, get_args(Channel))


class _Unbounded:
    def post(self, route: WorkerRoute, micro_batch: int, time: float, *, sends: bool) -> list[Transfer]:
        number, _, _, delay = route
        return [Transfer((number, micro_batch), time, time + delay, True)] if sends else []


_Post = tuple[Message, float, WorkerRoute]
"""One side of a transfer, and when it was posted."""


class _Queue:
    """A queue of posted transfers, the end of its last transfer, and the message of that."""

    __slots__ = ("free", "last", "posted")

    def __init__(self) -> None:
        self.posted: deque[_Post] = deque()
        self.free = 0.0
        self.last: Message | None = None


def _transferred(sent: _Post, wanted: _Post, *queues: _Queue) -> Transfer:
    """The transfer that both sides have posted; it occupies these queues."""
    message, start, route = sent
    cause: bool | Message = True
    if wanted[1] > start:
        start, cause = wanted[1], False
    for queue in queues:
        if queue.free > start and queue.last is not None:
            start, cause = queue.free, queue.last
    end = start + route.delay
    for queue in queues:
        queue.free, queue.last = end, message
    return Transfer(message, start, end, cause)


class _Pair:
    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], _Queue] = defaultdict(_Queue)
        self._wanted: dict[tuple[int, int], deque[_Post]] = defaultdict(deque)

    def post(self, route: WorkerRoute, micro_batch: int, time: float, *, sends: bool) -> list[Transfer]:
        number, sender, receiver, _ = route
        queue, wanted = self._sent[sender, receiver], self._wanted[sender, receiver]
        sent = queue.posted
        (sent if sends else wanted).append(((number, micro_batch), time, route))
        done = []
        while sent and wanted and sent[0][0] == wanted[0][0]:
            done.append(_transferred(sent.popleft(), wanted.popleft(), queue))
        return done


class _Worker:
    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = defaultdict(_Queue)

    def post(self, route: WorkerRoute, micro_batch: int, time: float, *, sends: bool) -> list[Transfer]:
        own = route.sender if sends else route.receiver
        self._queues[own].posted.append(((route.number, micro_batch), time, route))
        done = []
        changed = [own]
        while changed:
            head = self._queues[changed.pop()].posted
            if not head:
                continue
            _, sending, receiving, _ = head[0][2]
            sender, receiver = self._queues[sending], self._queues[receiving]
            if sender.posted and receiver.posted and sender.posted[0][0] == receiver.posted[0][0]:
                changed += sending, receiving
                done.append(_transferred(sender.posted.popleft(), receiver.posted.popleft(), sender, receiver))
        return done
