"""The first exception of a mini-batch: it is kept with a note of its place, and the other workers are woken."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.schedule import Action


class Stopped(Exception):
    """Raised in a worker that is woken because another one has failed. It never leaves the runtime."""


def add_note(error: BaseException, text: str) -> None:
    """Adds a note to an exception, once, also if a layer raises the same object several times."""
    note = f"pipework: {text}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


class Failure:
    """The first failure of one run; every worker reads `happened` before each of its actions.

    Args:
        stop: wakes the workers that wait for a value.
        explained: gives the error to raise, which may have its cause in another process; None: the first one.

    Attributes:
        happened: whether an action has failed.
        error: the first exception, until `raise_first` raises it.
        place: the stage, micro-batch and action in which it was raised; empty: in none, or in another process.
    """

    __slots__ = ("__weakref__", "_explained", "_lock", "_stop", "error", "happened", "place")

    def __init__(
        self, stop: Callable[[], None], explained: Callable[[BaseException], BaseException] | None = None
    ) -> None:
        self.happened = False
        self.error: BaseException | None = None
        self.place = ""
        self._stop = stop
        self._explained = explained
        self._lock = threading.RLock()

    def report(self, error: BaseException, action: Action | None = None) -> None:
        """Keeps the error if it is the first, adds a note of its stage and action, and wakes the waiting workers."""
        with self._lock:
            if self.happened:
                return
            if action is not None:
                which = f", micro-batch {action.micro_batch}" if action.micro_batch >= 0 else ""
                self.place = f"stage {action.stage}{which}, action {action.kind}"
                add_note(error, self.place)
            self.error = error
            self.happened = True
        self._stop()

    def raise_first(self) -> NoReturn:
        """Raises the first exception in the caller's thread: the original object, or that which explains it."""
        error, self.error = self.error, None
        assert error is not None
        if self._explained is not None:
            error = self._explained(error)
        try:
            raise error
        finally:
            # The traceback refers to this frame. If the frame referred to the error, the cycle would keep the tensors
            # of the step alive.
            del error
