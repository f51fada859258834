"""Transports: they carry values from the action that computes them to the action that needs them.

A message is addressed to the action that consumes it: the forward of stage 2 on micro-batch 5 waits for the message to
`("F", 2, 5)`. The thread that called the pipe has the stage numbers -1 and `stages`: it sends the inputs to stage 0 and
receives the outputs of the last stage. A transport knows no schedule, and the loop knows no queues. A transport between
processes has the same interface.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from pipework.runtime.failure import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeAlias

    from torch import Tensor

    from pipework.runtime.device import Link
    from pipework.schedule import Action

    # Tensors, and mostly their structure (None: a single tensor).
    Message: TypeAlias = tuple[tuple[Any, ...], Any]
    Inbox: TypeAlias = SimpleQueue[Any]
    # send(micro_batch, tensors, structure)
    Send: TypeAlias = Callable[[int, tuple[Tensor | None, ...], Any], None]


# Put into an inbox to wake a worker that waits for a value that will not come.
WAKE_UP = None

Address = tuple[str, int, int]  # an action's kind, stage and micro-batch


class Endpoint(Protocol):
    """One worker's side of a transport."""

    def sender(self, kind: str, stage: int) -> Send:
        """Returns a function that sends to the actions of that kind and stage. It never waits for the receiver."""

    def receive(self, address: Address) -> Message:
        """Waits for the value addressed to this action. Raises `Stopped` when another worker has failed."""

    @property
    def handlers(self) -> Mapping[str, Callable[[Action], None]]:
        """By kind, the functions for communication actions, if the schedule has any."""

    def finish(self) -> None:
        """Called on the worker's thread after its last action, unless an action has failed."""


class Transport(Protocol):
    """Connects the workers of one run with each other and with the outside."""

    @property
    def endpoints(self) -> Mapping[int, Endpoint]:
        """The endpoints of this process, by the number of the worker."""

    @property
    def outside(self) -> Endpoint:
        """The endpoint of the thread that called the pipe."""

    def take_undelivered(self) -> list[tuple[Address, Any]]:
        """After a failure: takes out the messages that nobody will receive."""

    def stop(self) -> None:
        """Wakes every worker that waits: it raises `Stopped`."""

    def close(self) -> None:
        """After the run: drops everything of the mini-batch."""


class LocalEndpoint:
    """An endpoint within one process: messages are handed over by reference through one queue per worker.

    Args:
        inbox: the queue of this worker.
        inboxes: for each stage the queue of its worker, and last the queue of the calling thread.
        links: for each stage the link that copies to its device; None: tensors are passed by reference.
    """

    __slots__ = ("_inboxes", "_links", "_pending", "inbox")

    def __init__(self, inbox: Inbox, inboxes: Sequence[Inbox], links: Sequence[Link | None]) -> None:
        self.inbox = inbox
        self._inboxes = inboxes
        self._links = links
        self._pending: dict[Address, tuple[Message, Callable[[], None] | None]] = {}

    def sender(self, kind: str, stage: int) -> Send:
        """See `Endpoint.sender`; a copy to another device starts at once and overlaps with computation."""
        outside = len(self._inboxes) - 1
        place = stage if 0 <= stage < outside else outside
        put, link = self._inboxes[place].put, self._links[place]

        def send(micro_batch: int, tensors: tuple[Tensor | None, ...], structure: Any) -> None:
            put(((kind, stage, micro_batch), (tensors, structure), None))

        if place < outside and self._inboxes[place] is self.inbox:
            # To another stage of the same worker, which looks among the early messages first.
            pending = self._pending

            def keep(micro_batch: int, tensors: tuple[Tensor | None, ...], structure: Any) -> None:
                pending[kind, stage, micro_batch] = ((tensors, structure), None)

            return keep
        if link is None:
            return send

        def send_through_link(micro_batch: int, tensors: tuple[Tensor | None, ...], structure: Any) -> None:
            copies, event = link.depart(tensors)
            put(((kind, stage, micro_batch), (copies, structure), lambda: link.arrive(copies, event)))

        return send_through_link

    def receive(self, address: Address) -> Message:
        """See `Endpoint.receive`. Messages to later actions are kept."""
        pending = self._pending
        early = pending.pop(address, None)
        if early is not None:
            message, arrive = early
        else:
            while True:
                letter = self.inbox.get()
                if letter is WAKE_UP:
                    raise Stopped
                key, message, arrive = letter
                if key == address:
                    break
                pending[key] = (message, arrive)
        if arrive is not None:
            arrive()
        return message

    def take_undelivered(self) -> list[tuple[Address, Any]]:
        """See `Transport.take_undelivered`: those to this worker."""
        taken: list[tuple[Address, Any]] = [(address, message) for address, (message, _) in self._pending.items()]
        self._pending.clear()
        while not self.inbox.empty():
            letter = self.inbox.get()
            if letter is not WAKE_UP:
                taken.append((letter[0], letter[1]))
        return taken

    @property
    def handlers(self) -> Mapping[str, Callable[[Action], None]]:
        """See `Endpoint.handlers`: values are sent when they are computed, so there are none."""
        return {}

    def finish(self) -> None:
        """See `Endpoint.finish`: there is nothing to wait for."""


class LocalTransport:
    """The endpoints of one run in one process, connected.

    A new one is made for each run, so that no message of an earlier run is received. Endpoints refer only to queues and
    not to each other: a reference cycle would keep a failed run's tensors alive.

    Args:
        placement: the worker of each stage.
        links: by pair of workers, the link between their devices (None or missing: tensors are passed by reference);
            `(w, w)` has the link from the caller to worker w.
    """

    def __init__(self, placement: tuple[int, ...], links: Mapping[tuple[int, int], Link | None]) -> None:
        self._inboxes: list[Inbox] = [SimpleQueue() for _ in range(max(placement, default=-1) + 1)]
        self.outside_inbox: Inbox = SimpleQueue()
        inboxes = [*(self._inboxes[worker] for worker in placement), self.outside_inbox]
        self.outside = LocalEndpoint(
            self.outside_inbox, inboxes, [*(links.get((worker, worker)) for worker in placement), None]
        )
        self.endpoints = {
            number: LocalEndpoint(
                inbox,
                inboxes,
                [*(links.get((number, worker)) if worker != number else None for worker in placement), None],
            )
            for number, inbox in enumerate(self._inboxes)
        }

    def take_undelivered(self) -> list[tuple[Address, Any]]:
        """See `Transport.take_undelivered`."""
        return [each for end in (*self.endpoints.values(), self.outside) for each in end.take_undelivered()]

    def stop(self) -> None:
        """See `Transport.stop`."""
        for inbox in self._inboxes:
            inbox.put(WAKE_UP)

    def close(self) -> None:
        """See `Transport.close`: there is nothing to drop."""
