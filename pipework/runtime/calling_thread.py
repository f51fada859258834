"""The calling thread as a worker: it runs a job by itself, and no signal handler interrupts the job.

Python calls signal handlers on the main thread, between any two instructions. Ctrl-C there raises KeyboardInterrupt,
perhaps between taking a parameter out of its module and putting it back. So while a job runs on the main thread,
handlers are called as usual, but what they raise is kept, and the job ends before its next action.
"""

from __future__ import annotations

# Its functions leave numbers as they are; those of `signal` make enumerations of them, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import itertools
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

_SIGNALS: Final = tuple(map(int, signal.valid_signals()))


class _Thread(threading.local):
    """Whether this thread runs a job; every thread starts with the class attribute."""

    is_worker = False


_thread = _Thread()


def become_worker() -> None:
    """Called by a thread that runs jobs only."""
    _thread.is_worker = True


def is_free() -> bool:
    """Whether the current thread may run a job: not inside of another one, whose random streams are the thread's."""
    return not _thread.is_worker


def run_here(job: Callable[[], None], interrupted: Callable[[BaseException], None]) -> None:
    """Runs a job on the current thread.

    Args:
        job: must not raise.
        interrupted: called with what a signal handler raises; it must make the job end soon.
    """
    with _HandlersHeld(interrupted):
        _thread.is_worker = True
        try:
            job()
        finally:
            _thread.is_worker = False


class _HandlersHeld:
    """A context in which Python's signal handlers do not raise, if this is the main thread.

    What `signal.siginterrupt` said of such a signal is lost, and what C code has put over a handler of Python's: Python
    cannot ask for either.
    """

    __slots__ = ("_handlers", "_holds", "_interrupted", "_process")

    def __init__(self, interrupted: Callable[[BaseException], None]) -> None:
        self._interrupted = interrupted
        self._handlers: dict[int, Any] = {}
        self._holds = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._holds = True
            self._process = os.getpid()
            try:
                # Looked at in C: of some sixty signals one or two have a handler in Python.
                for number in itertools.compress(_SIGNALS, map(callable, map(_signal.getsignal, _SIGNALS))):
                    self._handlers[number] = _signal.getsignal(number)
                    _signal.signal(number, self._handle)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        waiting = list(self._handlers.items())
        while waiting:
            number, handler = waiting[-1]
            try:
                if _signal.getsignal(number) == self._handle:  # a layer may have set another one
                    _signal.signal(number, handler)
                waiting.pop()
            except BaseException as raised:  # by a handler that is back already
                self._interrupted(raised)
        self._holds = False

    def _handle(self, number: int, frame: Any) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            if not self._holds or os.getpid() != self._process:
                raise
            self._interrupted(error)
