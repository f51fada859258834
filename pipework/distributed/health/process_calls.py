"""The calls of all pipes of a process, so that ranks that call two pipes in another order find out why they wait.

Pipes whose layers call collectives of the same groups are called one after the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

MOST: Final = 50
"""Of how many pipes a process counts the calls: of those that it has used last."""


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
        if not self.pipe or not other.pipe:
            return False
        return _ahead(self, other) and _ahead(other, self)


class ProcessCalls:
    """Counts the calls that the main thread of a process makes.

    A pipe that another thread calls is left out from then on: threads have no common order.

    Attributes:
        place: the present one.

    Example:
        >>> calls = ProcessCalls()
        >>> first, second = calls.of_pipe(1), calls.of_pipe(2)
        >>> second.begin()
        >>> calls.place
        ProcessPlace(pipe=2, begun={1: 0, 2: 1})
        >>> second.end()
        >>> calls.place.pipe
        0
    """

    def __init__(self) -> None:
        self.place = ProcessPlace()
        self._left_out: set[int] = set()
        self._lock = threading.Lock()
        self._in_groups = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """It hangs on the mesh, of which a copy is of another process."""
        return ProcessCalls, ()

    def of_pipe(self, number: int) -> PipeCalls:
        """The calls of a pipe, which is made now.

        Args:
            number: of the pipe.
        """
        self._set(0, number, 0)
        return PipeCalls(self, number)

    def begin(self, number: int) -> None:
        """A call of that pipe begins."""
        self._set(number, number, self.place.begun.get(number, 0) + 1)

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

    def _set(self, inside: int, number: int, begun: int) -> None:
        with self._lock:
            others = {each: count for each, count in self.place.begun.items() if each != number}
            if threading.current_thread() is not threading.main_thread():
                self._left_out.add(number)
                self.place = self.place._replace(begun=others)
            elif number not in self._left_out:
                kept = list(others.items())[1 - MOST :]
                self.place = ProcessPlace(inside, {**dict(kept), number: begun})


class PipeCalls(NamedTuple):
    """Those of one pipe.

    Attributes:
        process: the calls of all pipes of the process.
        number: of the pipe.
    """

    process: ProcessCalls
    number: int

    def begin(self) -> None:
        """The pipe's next call begins."""
        self.process.begin(self.number)

    def end(self) -> None:
        """It has ended."""
        self.process.end()


def _ahead(one: ProcessPlace, other: ProcessPlace) -> bool:
    """Whether the call in which a process is was not begun by the other one, as far as both count that pipe's."""
    mine, theirs = one.begun.get(one.pipe), other.begun.get(one.pipe)
    return mine is not None and theirs is not None and theirs < mine
