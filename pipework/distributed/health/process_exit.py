"""How a failed process ends: with an exit code that says why, and within a few seconds even if something hangs."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import faulthandler
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from pipework.distributed.health.errors import PipelineError, exit_code

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_LOG = logging.getLogger("pipework")

GRACE: Final = 5.0
"""Seconds that a process which has failed may take to exit."""

_PEER_EXIT_DELAY: Final = 1.0  # seconds by which the other ranks end later than the one that raised an exception


class ExitHook:
    """Ends the program with the `exit_code` of an uncaught exception.

    Args:
        previous: the hook before this one, which still prints the exception.

    Attributes:
        was_called: whether an exception, or Ctrl-C, ends the program.
    """

    def __init__(self, previous: Callable[..., Any]) -> None:
        self._previous = previous
        self._code: int | None = None
        self._running = _thread.allocate_lock()  # held from an uncaught exception until the interpreter exits
        self.was_called = False

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """As `sys.excepthook`."""
        self.was_called = True
        self._previous(kind, error, traceback)
        if isinstance(error, KeyboardInterrupt):
            return  # the interpreter ends as interrupted programs do
        self._code = exit_code(error)
        if self._running.acquire(blocking=False):
            end_after(GRACE, self._code, self._running.acquire)  # Python 3.12 starts no thread while it exits
        if isinstance(error, PipelineError) and error.kind == "error":
            # A launcher takes the first process that ends for the cause, and ends all others. So the one that failed
            # ends first.
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(_PEER_EXIT_DELAY)
        raise SystemExit(self._code)

    def limit_exit(self) -> None:
        """Limits the time in which the interpreter exits after an uncaught exception."""
        if self._code is not None:
            self._running.release()
            # The interpreter may stop even that thread while it exits.
            with contextlib.suppress(Exception):  # it needs a standard error
                faulthandler.dump_traceback_later(GRACE + 2, exit=True)


def install() -> ExitHook:
    """Has uncaught exceptions end the program with an exit code that tells which process failed."""
    if isinstance(sys.excepthook, ExitHook):
        return sys.excepthook
    sys.excepthook = hook = ExitHook(sys.excepthook)
    atexit.register(hook.limit_exit)
    return hook


def end_after(seconds: float, code: int, begin: Callable[[], object] = bool) -> None:
    """Ends the process after some seconds, if it has not ended by itself. Takes no lock, for signal handlers.

    Args:
        seconds: after `begin` has returned.
        code: the exit code.
        begin: called by the thread that counts the seconds.
    """

    def expire() -> None:
        begin()
        time.sleep(seconds)
        os._exit(code)

    _thread.start_new_thread(expire, ())


def end_now(text: str, code: int) -> None:
    """Ends the process at once, because one of its threads does not end, and prints the stacks of all threads."""
    end_after(1.0, code)  # in case that the standard error is blocked
    _LOG.critical("%s", text)
    with contextlib.suppress(Exception):
        logging.shutdown()  # writes what handlers still hold
    time.sleep(0.05)  # until that thread runs: at one that does not run yet, Python 3.14 stops printing
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(code)
