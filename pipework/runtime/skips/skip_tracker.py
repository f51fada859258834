"""The tracker of a thread, which takes the tensors that layers stash and gives those that they pop.

A skippable layer knows no stage, so it uses the tracker of the thread that it runs on. Inside of a pipe the worker has
set that of its stage and micro-batch.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from torch import Tensor


class SkipTracker(Protocol):
    """Takes and gives the tensors of skip connections; a key is a namespace and a name."""

    def save(self, key: Hashable, tensor: Tensor | None, poppers: int) -> None:
        """Called when a layer stashes a tensor; `poppers` layers pop it."""

    def load(self, key: Hashable) -> Tensor | None:
        """Called when a layer pops. Raises a KeyError if nothing was stashed."""


class LocalTracker:
    """Keeps a stashed tensor until the last layer has popped it; in a stage to the end, since other stages pop it, too.

    Args:
        popped: in a stage, what its layers pop of earlier ones; None: this is no stage.
    """

    def __init__(self, popped: Mapping[Hashable, Tensor | None] | None = None) -> None:
        self._stays = popped is not None
        self._kept = {key: (tensor, 1) for key, tensor in (popped or {}).items()}

    def save(self, key: Hashable, tensor: Tensor | None, poppers: int) -> None:
        """See `SkipTracker.save`."""
        self._kept[key] = tensor, poppers

    def load(self, key: Hashable) -> Tensor | None:
        """See `SkipTracker.load`; the last call drops the tensor, but in a stage."""
        tensor, poppers = self._kept.pop(key)
        if poppers > 1 or self._stays:
            self._kept[key] = tensor, poppers - 1
        return tensor


class _ThreadTracker(threading.local):
    """The tracker of the current thread, made when it is first needed."""

    def __init__(self) -> None:
        self.tracker: SkipTracker = LocalTracker()


_thread = _ThreadTracker()


def current() -> SkipTracker:
    """The tracker of this thread."""
    return _thread.tracker


@contextlib.contextmanager
def using(tracker: SkipTracker) -> Iterator[None]:
    """Inside, layers on this thread use this tracker."""
    before, _thread.tracker = _thread.tracker, tracker
    try:
        yield
    finally:
        _thread.tracker = before
