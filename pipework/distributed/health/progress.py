"""What a rank is doing at the moment: written by its hot loop without locks, read now and then by its monitor."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING

from pipework.distributed.health.failure_detector import Stopwatch
from pipework.distributed.health.status import PeerFailure, describe_action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipework.distributed.health.status import Call


class Progress:
    """Plain attributes: to set two of them for each action costs some tens of nanoseconds.

    Attributes:
        action: what runs now, any object; it becomes text only when somebody asks.
        count: another number for every action.
        waiting: whether the rank waits for another one, rather than computing.

    Example:
        >>> progress = Progress()
        >>> progress.action = "optimizer"
        >>> progress.count += 1
    """

    __slots__ = ("action", "count", "waiting")

    def __init__(self) -> None:
        self.action: object = None
        self.count = 0
        self.waiting = False

    def waits(self) -> Progress:
        """As a context: the rank waits for others inside."""
        return self

    def __enter__(self) -> None:
        self.waiting = True

    def __exit__(self, *_: object) -> None:
        self.waiting = False


class Overdue:
    """Finds out that one action takes too long, while the process as such is well.

    A rank that waits for another one has twice the time, so that the one is named which makes all the others wait; what
    it does after such a wait has a time of its own. As long as some rank has not even come to the call, such as one
    that still loads data, nobody who waits is stuck.

    Args:
        rank: whose progress it is.
        name: of that rank, for messages.
        limit: seconds for an action.
        longest: seconds that count at most between two looks.
    """

    def __init__(self, rank: int, name: str, limit: float, longest: float) -> None:
        self._rank = rank
        self._name = name
        self._limit = limit
        self._clock = Stopwatch(longest)
        self._current = (-1, -1, False)
        self._seconds = 0.0

    def look(self, now: float, progress: Progress, call: Call, *, all_came: bool = True) -> PeerFailure | None:
        """Says whether the rank is stuck now.

        Args:
            now: of a clock of one's own, in seconds.
            progress: what the rank does.
            call: where it is.
            all_came: whether all other ranks have begun this call, too.
        """
        elapsed = self._clock.look(now)
        current = (call.number, progress.count, progress.waiting)
        if not call.inside or current != self._current or (progress.waiting and not all_came):
            self._current, self._seconds = current, 0.0
            return None
        self._seconds += elapsed
        waiting = current[-1]  # progress goes on meanwhile
        if self._seconds <= self._limit * (1 + waiting):
            return None
        doing = "has waited" if waiting else "has been busy"
        action = describe_action(progress.action)
        text = f"{self._name} is stuck: it {doing} for {self._seconds:.1f} s with one action, {action}"
        return PeerFailure(self._rank, "stuck", text, action, "".join(_stacks()))


def _stacks() -> Iterator[str]:
    """Where each thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if not name.startswith("pipework monitor"):
            yield f"thread {name!r}:\n"
            yield from traceback.format_stack(frame, limit=20)
