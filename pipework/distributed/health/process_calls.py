"""The calls of all pipes of a process, so that ranks that call two pipes in another order find out why they wait.

Pipes whose layers call collectives of the same groups are called one after the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

MOST: Final = 50
"""Of how many pipes a process counts the calls: of those that were made last."""


class ProcessPlace(NamedTuple):
    """Where a process is in the calls of all its pipes.

    Attributes:
        pipe: the number of the pipe in whose call it is, from 1, in the order in which pipes were made; 0: in none.
        begun: for each pipe, how many of its calls the process has begun.
    """

    pipe: int = 0
    begun: Mapping[int, int] = {}  # never changed: a new one is made

    def crosses(self, other: ProcessPlace) -> bool:
        """Whether two processes wait in calls of two pipes, each of which the other one has not begun.

        If all make the same calls in the same order, one of two has made all that the other has made.

        Example:
            >>> ProcessPlace(1, {1: 1, 2: 0}).crosses(ProcessPlace(2, {1: 0, 2: 1}))
            True
            >>> ProcessPlace(1, {1: 2, 2: 1}).crosses(ProcessPlace(2, {1: 1, 2: 1}))
            False
        """
        if self.pipe not in other.begun or other.pipe not in self.begun:  # one is in no call, or not all count the pipe
            return False
        mine, theirs = self.begun, other.begun
        return theirs[self.pipe] < mine.get(self.pipe, 0) and mine[other.pipe] < theirs.get(other.pipe, 0)


class ProcessCalls:
    """Counts the calls that the main thread of a process makes.

    A pipe that another thread calls is left out from then on: threads have no common order.

    Attributes:
        place: the present one.

    Example:
        >>> calls = ProcessCalls()
        >>> calls.add(1), calls.add(2), calls.begin(2)
        (None, None, None)
        >>> calls.place
        ProcessPlace(pipe=2, begun={1: 0, 2: 1})
        >>> calls.end()
        >>> calls.place.pipe
        0
    """

    def __init__(self) -> None:
        self.place = ProcessPlace()
        self._lock = threading.Lock()
        self._in_groups = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """It hangs on the mesh, of which a copy is of another process."""
        return ProcessCalls, ()

    def add(self, pipe: int) -> None:
        """A pipe of that number is made."""
        with self._lock:
            latest = list(self.place.begun.items())[1 - MOST :]
            self.place = self.place._replace(begun={**dict(latest), pipe: 0})

    def begin(self, pipe: int) -> None:
        """A call of that pipe begins."""
        with self._lock:
            begun = dict(self.place.begun)
            if threading.current_thread() is not threading.main_thread():
                begun.pop(pipe, None)
                self.place = self.place._replace(begun=begun)
            elif pipe in begun:
                self.place = ProcessPlace(pipe, {**begun, pipe: begun[pipe] + 1})

    def end(self) -> None:
        """The present call has ended."""
        if threading.current_thread() is threading.main_thread():
            with self._lock:
                self.place = self.place._replace(pipe=0)

    @contextlib.contextmanager
    def in_groups(self, what: str) -> Iterator[None]:
        """Entered around a call of a pipe whose layers call collectives.

        Args:
            what: the name of the call.

        Raises:
            RuntimeError: another thread is in such a call.
        """
        if not self._in_groups.acquire(blocking=False):
            raise RuntimeError(
                f"a {what} of this pipe begins while another thread of this process calls another pipe over the same "
                "mesh, and their layers have the same groups of processes: collectives of both would be mixed up. Make "
                "the calls of both from one thread, or give each a mesh of its own, by init_device_mesh"
            )
        try:
            yield
        finally:
            self._in_groups.release()
