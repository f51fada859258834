"""How a process ends that failed: with an exit code that says why, and in a few seconds whatever is stuck."""

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
from pipework.distributed.health.tracebacks import outer_part

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_LOG = logging.getLogger("pipework")

GRACE: Final = 5.0
"""Seconds that a process which has failed may take to exit."""

_COURTESY: Final = 1.0  # seconds by which who hears of an exception ends later than who raised it


class ExitHook:
    """Ends the program with `exit_code` of the exception that nobody has handled.

    Args:
        previous: the hook that was there before, which still prints the exception.
    """

    def __init__(self, previous: Callable[..., Any]) -> None:
        self._previous = previous
        self._code: int | None = None

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """As `sys.excepthook`."""
        if isinstance(error, PipelineError):
            self._print_shortened(kind, error, traceback)
        else:
            self._previous(kind, error, traceback)
        if isinstance(error, KeyboardInterrupt):
            return  # the interpreter ends as interrupted programs do
        self._code = exit_code(error)
        if isinstance(error, PipelineError) and error.kind == "error":
            # A launcher takes who ends first for the cause, and ends all the others: that should be who has failed.
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(_COURTESY)
        raise SystemExit(self._code)

    def _print_shortened(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """What happened elsewhere: here it matters what was called, and not how pipework has heard of it."""
        whole = error.__traceback__
        error.__traceback__ = outer_part(traceback)  # the interpreter prints this, whatever it is given
        try:
            self._previous(kind, error, error.__traceback__)
        finally:
            error.__traceback__ = whole

    def bound(self) -> None:
        """When the interpreter exits after such an exception: not for ever."""
        if self._code is not None:
            end_after(GRACE, self._code)
            # Should even that thread be stopped, since the interpreter is half gone.
            with contextlib.suppress(Exception):  # who has no standard error cannot have this
                faulthandler.dump_traceback_later(GRACE + 2, exit=True)


def install() -> None:
    """Has uncaught exceptions end the program with an exit code that tells who failed."""
    if not isinstance(sys.excepthook, ExitHook):
        sys.excepthook = hook = ExitHook(sys.excepthook)
        atexit.register(hook.bound)


def end_after(seconds: float, code: int) -> None:
    """Ends the process after a while, if it has not ended by itself. Takes no lock: signal handlers may call this.

    Args:
        seconds: so long it may take.
        code: its exit code then.
    """

    def expire() -> None:
        time.sleep(seconds)
        os._exit(code)

    _thread.start_new_thread(expire, ())


def end_now(text: str, code: int) -> None:
    """Ends the process at once, because one of its threads does not come to an end.

    Args:
        text: why.
        code: its exit code.
    """
    end_after(1.0, code)  # should the standard error be blocked
    _LOG.critical("%s", text)
    with contextlib.suppress(Exception):
        logging.shutdown()  # what handlers still hold, such as those that write to files
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(code)
