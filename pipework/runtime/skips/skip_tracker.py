"""Where a layer's stashed tensors go, and where popped ones come from.

A skippable layer asks through a plain function call, so it finds its tracker through the thread that it runs on.
Outside of a pipe that is a dictionary of the thread; inside, the stage's worker has put a tracker of its own there.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from torch import Tensor


class SkipTracker(Protocol):
    """Takes and gives the tensors of skip connections; a key names one (namespace and name)."""

    def save(self, key: Hashable, tensor: Tensor | None, poppers: int) -> None:
        """Called when a layer stashes what so many layers will pop."""

    def load(self, key: Hashable) -> Tensor | None:
        """Called when a layer pops; KeyError if nothing was stashed."""


class LocalTracker:
    """Keeps stashed tensors until the last of their poppers has asked."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Tensor | None, int]] = {}

    def save(self, key: Hashable, tensor: Tensor | None, poppers: int) -> None:
        """See `SkipTracker.save`."""
        self._kept[key] = tensor, poppers

    def load(self, key: Hashable) -> Tensor | None:
        """See `SkipTracker.load`; the last popper's call forgets the tensor."""
        tensor, poppers = self._kept.pop(key)
        if poppers > 1:
            self._kept[key] = tensor, poppers - 1
        return tensor


class _ThreadTracker(threading.local):
    """The tracker of the current thread, made when it is first needed."""

    tracker: SkipTracker | None = None


_thread = _ThreadTracker()


def current() -> SkipTracker:
    """The tracker that layers on this thread talk to."""
    if _thread.tracker is None:
        _thread.tracker = LocalTracker()
    return _thread.tracker


@contextlib.contextmanager
def using(tracker: SkipTracker) -> Iterator[None]:
    """For the time of the context, layers on this thread talk to this tracker."""
    before, _thread.tracker = _thread.tracker, tracker
    try:
        yield
    finally:
        _thread.tracker = before
