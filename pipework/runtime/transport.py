"""Transports: they carry values from the action that computes them to the action that needs them.

A message is addressed to the action that consumes it: the forward of stage 2 on micro-batch 5 waits for the message to
`("F", 2, 5)`. The thread that called the pipe has the stage numbers -1 and `stages`: it sends the inputs to stage 0 and
receives the outputs of the last stage. A transport knows no schedule, and the loop knows no queues. A transport between
processes has the same interface.

Everything that can be looked up before a run is looked up when stages connect: `sender` and `receiver` give functions
for one kind of action and one stage, which take the number of the micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pipework.runtime.failure import Failure, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, TypeAlias

    from pipework.runtime.device import Link
    from pipework.schedule import Action

    # Executes an action.
    Handler: TypeAlias = Callable[[Action], None]
    # Tensors, and mostly their structure (None: a single tensor).
    Message: TypeAlias = tuple[tuple[Any, ...], Any]
    # send(micro_batch, message)
    Send: TypeAlias = Callable[[int, Message], None]
    # receive(micro_batch)
    Receive: TypeAlias = Callable[[int], Message]
    Inbox: TypeAlias = SimpleQueue[bool | None]
    Boxes: TypeAlias = dict[tuple[str, int], dict[int, Any]]


# Put into an inbox to wake a worker that waits for a value that will not come.
WAKE_UP = None

Address = tuple[str, int, int]  # an action's kind, stage and micro-batch


class Endpoint(Protocol):
    """One worker's side of a transport."""

    def sender(self, kind: str, stage: int) -> Send:
        """Returns a function that sends to the actions of that kind and stage. It never waits for the receiver."""

    def receiver(self, kind: str, stage: int) -> Receive:
        """Returns a function that waits for what is sent to an action of that kind and stage.

        It raises `Stopped` when another worker has failed.
        """

    def handlers(self, of_stage: Mapping[str, Handler]) -> Mapping[str, Handler]:
        """By kind, the functions that execute the actions of a stage: its own, and those for communication."""

    def finish(self) -> None:
        """Called on the worker's thread after its last action, unless an action has failed."""


class Transport(Protocol):
    """Connects the workers of one run with each other and with the outside.

    Attributes:
        outside: the endpoint of the thread that called the pipe. It sends before the run, and receives after it.
        failure: of the run; the first one wakes every worker that waits, which raises `Stopped`.
    """

    outside: Endpoint
    failure: Failure

    @property
    def endpoints(self) -> Mapping[int, Endpoint]:
        """The endpoints of this process, by the number of the worker."""

    def close(self) -> None:
        """After the run: drops everything of the mini-batch."""


class _UnderWay(NamedTuple):
    """A message whose tensors are copied to another device.

    Attributes:
        message: with the copies.
        arrive: makes the receiver's stream wait for them.
    """

    message: Message
    arrive: Callable[[], None]


@dataclass(slots=True)
class LocalEndpoint:
    """An endpoint within one process: messages are handed over by reference.

    A message lies in the box of its kind of action and stage, where its receiver takes it out. If that is another
    worker, which may be waiting, a token in the worker's inbox wakes it.

    Attributes:
        boxes: of all stages and of the outside.
        inbox: of this worker; None: the worker never waits, because a message is sent before it is asked for.
        ways: to the stages of other workers: the inbox of the worker, None if that one never waits; and the link that
            copies to its device, None if tensors are passed by reference.
    """

    boxes: Boxes
    inbox: Inbox | None
    ways: Mapping[int, tuple[Inbox | None, Link | None]]

    def sender(self, kind: str, stage: int) -> Send:
        """See `Endpoint.sender`; a copy to another device starts at once and overlaps with computation."""
        box = self.boxes[kind, stage]
        inbox, link = self.ways.get(stage, (None, None))

        def send(micro_batch: int, message: Message) -> None:
            if link is None:
                box[micro_batch] = message
            else:
                copies, event = link.depart(message[0])
                box[micro_batch] = _UnderWay((copies, message[1]), lambda: link.arrive(copies, event))
            if inbox is not None:
                inbox.put(True)

        return send

    def receiver(self, kind: str, stage: int) -> Receive:
        """See `Endpoint.receiver`. Messages to other actions stay in their boxes."""
        take, inbox = self.boxes[kind, stage].pop, self.inbox

        def receive(micro_batch: int) -> Message:
            if inbox is None:
                message = take(micro_batch)
            else:
                while (message := take(micro_batch, None)) is None:
                    if inbox.get() is WAKE_UP:
                        raise Stopped
            if type(message) is _UnderWay:
                message.arrive()
                return message.message
            return message  # type: ignore[no-any-return]

        return receive

    def handlers(self, of_stage: Mapping[str, Handler]) -> Mapping[str, Handler]:
        """See `Endpoint.handlers`: values are sent when they are computed, by the stage's own actions."""
        return of_stage

    def finish(self) -> None:
        """See `Endpoint.finish`: there is nothing to wait for."""


class LocalTransport:
    """The endpoints of one run in one process, connected.

    A new one is made for each run, so that no message of an earlier run is received. Endpoints refer only to queues and
    boxes, and not to each other: a reference cycle would keep a failed run's tensors alive.

    Args:
        placement: the worker of each stage.
        links: by pair of workers, the link between their devices (None or missing: tensors are passed by reference);
            `(w, w)` has the link from the caller to worker w.
        one_thread: one thread runs all actions of this process, in an order in which each message is sent before it is
            received.
    """

    def __init__(
        self, placement: tuple[int, ...], links: Mapping[tuple[int, int], Link | None], *, one_thread: bool = False
    ) -> None:
        boxes: Boxes = defaultdict(dict)
        inboxes: list[Inbox | None] = [None if one_thread else SimpleQueue() for _ in range(max(placement) + 1)]
        links = dict(links)  # another thread's step may make one meanwhile
        from_caller = {stage: (None, links.get((worker, worker))) for stage, worker in enumerate(placement)}
        self.failure = Failure(partial(_wake_all, inboxes))
        self.outside: Endpoint = LocalEndpoint(boxes, None, from_caller)
        self.endpoints: dict[int, Endpoint] = {}
        for number, inbox in enumerate(inboxes):
            others = [(stage, worker) for stage, worker in enumerate(placement) if worker != number]
            ways = {stage: (inboxes[worker], links.get((number, worker))) for stage, worker in others}
            self.endpoints[number] = LocalEndpoint(boxes, inbox, ways)

    def close(self) -> None:
        """See `Transport.close`: there is nothing to drop."""


def _wake_all(inboxes: Iterable[Inbox | None]) -> None:
    for inbox in inboxes:
        if inbox is not None:
            inbox.put(WAKE_UP)
