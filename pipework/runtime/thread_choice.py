"""Whether the workers of a process have a thread each or take turns on the calling one: what has been faster so far.

Between threads each message wakes one, and Python's lock goes to and fro at every operator. Where actions take some
ten microseconds that is more than the work itself, and the calling thread alone is done sooner. How long actions take
is known only from the runs before: if it is little, both ways are tried in turns, and the faster one stays. Results are
the same to the last bit, as they are for any number of threads.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pipework.schedule.schedule import Orders

SMALL: Final = 100e-6
"""Seconds of a run for each action of all workers, below which one thread is tried. Two workers pay from actions of 0.2
ms on; as they run at the same time, a run then has 0.1 ms for each."""
RUNS: Final = 5
"""So many runs are compared in each way."""
_FIRST: Final = 3  # runs that are not counted, in which layers are looked at and memory is found
_AGAIN: Final = 1000  # runs after which threads that were faster are compared again
_GROWN: Final = 2.0  # how many times longer runs on one thread may get until they are compared again


class ThreadChoice:
    """The choice for one list of orders, made from the seconds of its runs.

    Args:
        orders: the actions of each worker.

    Attributes:
        one_thread: whether the next run takes one thread.

    Example:
        >>> choice = ThreadChoice(((), ()))
        >>> choice.one_thread
        False
        >>> for _ in range(8):
        ...     choice.ran(20e-6, one_thread=False)
        >>> choice.one_thread  # is tried
        True
    """

    __slots__ = ("_actions", "_limit", "_one", "_threads", "_uncounted", "one_thread")

    def __init__(self, orders: Orders) -> None:
        self._actions = max(1, sum(map(len, orders)))
        self._begin(_FIRST)

    def _begin(self, uncounted: int) -> None:
        """With threads, until there are enough short runs."""
        self.one_thread = False
        self._uncounted = uncounted
        self._limit: float | None = None  # seconds of an action on one thread, once that is chosen
        self._threads: deque[float] = deque(maxlen=RUNS)  # seconds of an action in the last runs with threads
        self._one: deque[float] = deque(maxlen=RUNS)  # the same on one thread

    def ran(self, seconds: float, *, one_thread: bool) -> None:
        """Notes how long a run has taken, and how it was made. Runs come one after the other."""
        if one_thread is not self.one_thread:  # of another calling thread, or the caller's settings need threads
            return
        if self._uncounted:
            self._uncounted -= 1
            return
        threads, one = self._threads, self._one
        (one if one_thread else threads).append(seconds / self._actions)
        if self._limit is not None:
            if median(one) > self._limit:
                self._begin(0)
        elif len(one) == RUNS:
            if median(one) < median(threads):
                self.one_thread, self._limit = True, _GROWN * median(one)
            else:
                self._begin(_AGAIN)
        elif len(threads) == RUNS:
            self.one_thread = not one_thread and median(threads) < SMALL
