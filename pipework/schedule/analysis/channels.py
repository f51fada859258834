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
    return _Unbounded() if channel == "unbounded" else _Queued(of_pairs=channel == "pair")


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


class _Queued:
    """A queue for each worker; or two for each pair of workers, for what one sends and what the other wants."""

    def __init__(self, *, of_pairs: bool) -> None:
        self._of_pairs = of_pairs
        self._queues: dict[tuple[int, ...], _Queue] = defaultdict(_Queue)

    def post(self, route: WorkerRoute, micro_batch: int, time: float, *, sends: bool) -> list[Transfer]:
        changed = [self._ends(route)[not sends]]
        self._queues[changed[0]].posted.append(((route.number, micro_batch), time, route))
        done = []
        while changed:
            head = self._queues[changed.pop()].posted
            if not head:
                continue
            ends = self._ends(head[0][2])
            sender, receiver = (self._queues[end] for end in ends)
            if sender.posted and receiver.posted and sender.posted[0][0] == receiver.posted[0][0]:
                changed += ends
                done.append(_transferred(sender.posted.popleft(), receiver.posted.popleft(), sender, receiver))
        return done

    def _ends(self, route: WorkerRoute) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The queues of the sender and of the receiver."""
        _, sender, receiver, _ = route
        return ((sender, receiver, 0), (sender, receiver, 1)) if self._of_pairs else ((sender,), (receiver,))
