"""Workers that share nothing, on one CPU: what crosses a boundary is copied into the receiver's memory.

CPU workers hand tensors over by reference, so the memory of a value that two stages keep is there once and belongs to
none of them. On devices of their own each has its copy; only then has a stage a number of bytes that is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks.memory.live import ON_ITS_WAY, LiveStorages
from pipework.backend import Backend
from pipework.pipe import Pipe
from pipework.runtime.run_spec import RunSpec
from pipework.runtime.stage.actions import chained
from pipework.runtime.transport import LocalEndpoint
from pipework.schedule import Action

if TYPE_CHECKING:
    from pipework.runtime.transport import Handler


class CopyingLink:
    """The way to another worker, as between two accelerators: the copy starts when the value departs."""

    def __init__(self, storages: LiveStorages, receiver: int) -> None:
        self._storages = storages
        self._receiver = receiver

    def depart(self, tensors: tuple[Tensor | None, ...]) -> tuple[tuple[Tensor | None, ...], None]:
        """See `pipework.runtime.device.Link`."""
        copies = (None if tensor is None else self._storages.copied(tensor, self._receiver) for tensor in tensors)
        return tuple(copies), None

    def arrive(self, tensors: tuple[Tensor | None, ...], event: None) -> None:
        """See `pipework.runtime.device.Link`."""

    def hand_over(self, *, received: bool) -> None:
        """See `pipework.runtime.device.Link`: there are no streams."""


class TakingLink(CopyingLink):
    """The same, but that a copy counts from the moment on in which the receiver takes it.

    When that is, the order of the receiver's actions decides. How far a sender is ahead, the clock does.
    """

    def __init__(self, storages: LiveStorages, receiver: int) -> None:
        super().__init__(storages, ON_ITS_WAY)
        self._taker = receiver

    def arrive(self, tensors: tuple[Tensor | None, ...], event: None) -> None:
        """See `pipework.runtime.device.Link`."""
        self._storages.taken(tensors, self._taker)


class WatchedEndpoint:
    """Passes messages on, and calls a function before each action."""

    def __init__(self, inner: LocalEndpoint, begins: Callable[[Action], None]) -> None:
        self.sender, self.receiver, self.finish = inner.sender, inner.receiver, inner.finish
        self._begins = begins

    def handlers(self, of_stage: Mapping[str, Handler]) -> Mapping[str, Handler]:
        """See `pipework.runtime.transport.Endpoint`."""
        return {kind: chained(self._begins, handle) for kind, handle in of_stage.items()}


class WatchedBackend(Backend):
    """Tells the tracker whose action begins: under its mode one thread executes those of all workers.

    Args:
        storages: the tracker.
        placement: the worker of each stage.
    """

    def __init__(self, storages: LiveStorages, placement: Sequence[int]) -> None:
        super().__init__()
        self._storages = storages
        self._placement = placement

    def transport(self, spec: RunSpec) -> Any:
        """See `Backend`."""
        transport: Any = super().transport(spec)
        transport.endpoints = {
            worker: WatchedEndpoint(each, self._begins) for worker, each in transport.endpoints.items()
        }
        return transport

    def _begins(self, action: Action) -> None:
        self._storages.belongs_to(self._placement[action.stage])


def with_separate_memories(pipe: Pipe, storages: LiveStorages, *, when_taken: bool = False) -> Pipe:
    """Makes the pipe's CPU workers behave as if each had memory of its own, and tells the tracker whose is what.

    Args:
        pipe: with as many stages per worker as it likes.
        storages: the tracker.
        when_taken: a copy counts when the receiver takes it, not when it departs; the caller's rows are copied, too.
    """
    engine: Any = pipe._executor.engine_in_use()
    workers = range(len(engine.devices))
    make = TakingLink if when_taken else CopyingLink
    links = {(a, b): make(storages, b) if a != b or when_taken else None for a in workers for b in workers}
    engine.links, engine.backend = links, WatchedBackend(storages, engine.placement)
    return pipe
