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
from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol, get_args

from pipework.schedule.edges import Message

Channel = Literal["unbounded", "pair", "worker"]
"""The name of a model of channels."""


class Post(NamedTuple):
    """One side's wish to transfer a message.

    Attributes:
        message: which.
        sender: the worker that sends it.
        receiver: the worker that receives it.
        delay: how long the transfer takes.
        sends: whether it is the sender's wish, or the receiver's.
    """

    message: Message
    sender: int
    receiver: int
    delay: float
    sends: bool


class Transfer(NamedTuple):
    """A message that has come across, with its times."""

    message: Message
    start: float
    end: float


class Channels(Protocol):
    """All channels of a run."""

    def post(self, post: Post, time: float) -> Iterator[Transfer]:
        """Notes a wish; returns the transfers that now can take place."""


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
    def post(self, post: Post, time: float) -> Iterator[Transfer]:
        if post.sends:
            yield Transfer(post.message, time, time + post.delay)


class _Pair:
    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], deque[tuple[Message, float]]] = defaultdict(deque)
        self._wanted: dict[tuple[int, int], deque[tuple[Message, float]]] = defaultdict(deque)
        self._free: dict[tuple[int, int], float] = defaultdict(float)
        self._delay: dict[Message, float] = {}

    def post(self, post: Post, time: float) -> Iterator[Transfer]:
        pair = post.sender, post.receiver
        sent, wanted = self._sent[pair], self._wanted[pair]
        (sent if post.sends else wanted).append((post.message, time))
        self._delay[post.message] = post.delay
        while sent and wanted and sent[0][0] == wanted[0][0]:
            (message, one), (_, other) = sent.popleft(), wanted.popleft()
            start = max(one, other, self._free[pair])
            self._free[pair] = end = start + self._delay.pop(message)
            yield Transfer(message, start, end)


class _Worker:
    def __init__(self) -> None:
        self._queue: dict[int, deque[tuple[Post, float]]] = defaultdict(deque)
        self._free: dict[int, float] = defaultdict(float)

    def post(self, post: Post, time: float) -> Iterator[Transfer]:
        own = post.sender if post.sends else post.receiver
        self._queue[own].append((post, time))
        changed = [own]
        while changed:
            head = self._queue[changed.pop()]
            if not head:
                continue
            message, sender, receiver, delay, _ = head[0][0]
            ends = self._queue[sender], self._queue[receiver]
            if not all(queue and queue[0][0].message == message for queue in ends):
                continue
            posted = [queue.popleft()[1] for queue in ends]
            start = max(*posted, self._free[sender], self._free[receiver])
            self._free[sender] = self._free[receiver] = end = start + delay
            changed += sender, receiver
            yield Transfer(message, start, end)
