"""The first exception of a mini-batch: kept, named, and told to everyone who may be waiting."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.schedule import Action


class Stopped(Exception):
    """Raised inside a worker that finds, while it waits, that another one has failed. Never leaves the runtime."""


def add_note(error: BaseException, text: str) -> None:
    """Notes on an exception where it arose; once, also if a layer raises the same object again and again."""
    note = f"pipework: {text}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


class Failure:
    """What went wrong first in one run; every worker reads `happened` before each of its actions.

    Args:
        stop: wakes whoever waits for a value which will never come.

    Attributes:
        happened: whether anything went wrong.
        error: what was raised first, until it is raised again.
    """

    __slots__ = ("__weakref__", "_lock", "_stop", "error", "happened")

    def __init__(self, stop: Callable[[], None]) -> None:
        self.happened = False
        self.error: BaseException | None = None
        self._stop = stop
        self._lock = threading.Lock()

    def report(self, error: BaseException, action: Action | None) -> None:
        """Keeps the error if it is the first one, notes where it arose, and wakes whoever waits."""
        with self._lock:
            if self.happened:
                return
            if action is not None:
                which = f", micro-batch {action.micro_batch}" if action.micro_batch >= 0 else ""
                add_note(error, f"stage {action.stage}{which}, action {action.kind}")
            self.error = error
            self.happened = True
        self._stop()

    def explain(self, explained: Callable[[BaseException], BaseException]) -> None:
        """Lets somebody who knows more put another exception in the place of the first one."""
        if self.error is not None:
            self.error = explained(self.error)

    def raise_first(self) -> NoReturn:
        """Raises the original exception object in the caller's thread."""
        error, self.error = self.error, None
        assert error is not None
        try:
            raise error
        finally:
            # Its traceback refers to this frame, and a frame that refers back would keep every tensor of the step
            # alive.
            del error
