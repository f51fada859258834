"""Notices a hang: one action of this rank takes longer than `action_timeout`, while its heartbeats go on."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Final

from pipework.distributed.health.detection_times import CappedClock
from pipework.distributed.health.status import PeerFailure, describe_action

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from pipework.distributed.health.progress import Progress
    from pipework.distributed.health.status import Call

_COLLECTIVES: Final = (os.path.join("torch", "distributed", ""), os.path.join("pipework", "fsdp_private.py"))


class StuckDetector:
    """Measures how long the present action of this rank has taken.

    A rank that waits for another one has twice the time, so that the rank that all others wait for is found first; also
    one that waits in a collective of its layers, as its stacks show. The time starts again when the wait is over. While
    some rank has not entered the call, for example because it still loads data, no rank that waits is stuck.
    """

    def __init__(self, rank: int, name: str, limit: float, longest: float) -> None:
        self._rank = rank
        self._name = name
        self._limit = limit
        self._clock = CappedClock(longest)
        self._current = (-1, -1, False)
        self._seconds = 0.0

    def check(self, now: float, progress: Progress, call: Call, *, all_entered: bool = True) -> PeerFailure | None:
        """Returns the failure if the rank is stuck.

        Args:
            now: of a clock of this process, in seconds.
            progress: what the rank does.
            call: where it is.
            all_entered: whether all other ranks have begun this call, too.
        """
        elapsed = self._clock.elapsed(now)
        current = (call.number, progress.count, progress.waiting)
        if not call.inside or current != self._current or (progress.waiting and not all_entered):
            self._current, self._seconds = current, 0.0
            return None
        self._seconds += elapsed
        waiting = current[-1]  # the program may have changed progress meanwhile
        if self._seconds > self._limit and not waiting:
            waiting = is_in_collective()
        if self._seconds <= self._limit * (1 + waiting):
            return None
        doing = "has waited" if waiting else "has been busy"
        action = describe_action(progress.action)
        text = f"{self._name} is stuck: it {doing} for {self._seconds:.1f} s with one action, {action}"
        return PeerFailure(self._rank, "stuck", text, action, "".join(_stacks()))


def is_in_collective() -> bool:
    """Whether a thread of this process is in code that communicates for layers."""
    for frame in sys._current_frames().values():
        each: FrameType | None = frame
        while each is not None:
            if any(part in each.f_code.co_filename for part in _COLLECTIVES):
                return True
            each = each.f_back
    return False


def _stacks() -> Iterator[str]:
    """The stack of each thread of this process, except those of the monitor."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if not name.startswith("pipework monitor"):
            yield f"thread {name!r}:\n"
            yield from traceback.format_stack(frame, limit=20)
