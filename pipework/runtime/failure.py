"""The first exception of a mini-batch: kept, named, and told to everyone who may be waiting."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from queue import SimpleQueue
    from typing import Any

    from pipework.schedule import Action

# Put into an inbox it wakes a worker that waits for a value which will never come.
WAKE_UP = None


class Stopped(Exception):
    """Raised inside a worker that finds, while it waits, that another one has failed. Never leaves the runtime."""


class Failure:
    """What went wrong first in one run; every worker reads `happened` before each of its actions."""

    __slots__ = ("_error", "_inboxes", "_lock", "happened")

    def __init__(self, inboxes: list[SimpleQueue[Any]]) -> None:
        self.happened = False
        self._error: BaseException | None = None
        self._inboxes = inboxes
        self._lock = threading.Lock()

    def report(self, error: BaseException, action: Action | None) -> None:
        """Keeps the error if it is the first one, notes where it arose, and wakes whoever waits."""
        with self._lock:
            if self.happened:
                return
            if action is not None:
                error.add_note(
                    f"pipework: stage {action.stage}, micro-batch {action.micro_batch}, action {action.kind}"
                )
            self._error = error
            self.happened = True
        for inbox in self._inboxes:
            inbox.put(WAKE_UP)

    def raise_first(self) -> NoReturn:
        """Raises the original exception object in the caller's thread."""
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            # Its traceback refers to this frame, and a frame that refers back would keep every tensor of the step
            # alive.
            del error
