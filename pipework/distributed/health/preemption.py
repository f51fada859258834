"""Preemption: SIGTERM or SIGUSR1 to any rank stops all ranks after the same training step."""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from pipework.distributed.health.errors import PREEMPTED
from pipework.distributed.health.process_exit import end_after

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from pipework.distributed.health.monitor import HealthMonitor

_LOG = logging.getLogger("pipework")
_SUBJECT: Final = "preempt"
_ENDED: Final = b"pipework: a second SIGTERM: ended at once, the running step and what was not saved are lost\n"
_EXIT_WAIT: Final = 2.0  # seconds to print the error of a training that has failed


class Preemption:
    """Makes a request to end (SIGTERM, or SIGUSR1 from a cluster's scheduler) known to all ranks.

    The first signal only sets a flag, which all ranks receive within the `poll` seconds of their monitors. Ranks are at
    slightly different places, so that the flag alone would stop them at different steps. So one rank decides: that of
    the last stage reads `requested` at the end of every step, and sends the answer along with the results. The first
    signal is logged, with what will happen. A second SIGTERM ends the process at once, with exit code 143 and a line on
    standard error. If training has failed already, the first one does so within two seconds.

    A handler that the program has installed before is still called, after this one. A signal that native code
    handles keeps its handler. Python runs a handler when the main thread executes Python code the next time, so that
    thread must not block for long.
    """

    def __init__(self, monitor: HealthMonitor) -> None:
        # A handler stays installed: it must not keep the monitor, and with it a pipe that the program has dropped.
        self._monitor = weakref.ref(monitor)
        self._process = os.getpid()
        self._received: str | None = None
        self._terminated = False
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int] = {}

    def install(self) -> None:
        """Installs the handlers, if this is the main thread, which is the only one that may do so."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGUSR1):
            previous = signal.getsignal(number)
            if previous is None:
                _LOG.warning("%s is handled by native code already, so it does not end training", number.name)
            else:
                self._previous[number] = previous
                signal.signal(number, self._handle)
        if (monitor := self._monitor()) is not None:
            monitor.on_failure(self._exit_if_broken)

    def request(self, reason: str) -> None:
        """Does the same as a first signal."""
        if self._received is None:
            self._received = reason
            if (monitor := self._monitor()) is not None:
                monitor.announce(_SUBJECT, self._received)

    @property
    def requested(self) -> bool:
        """Whether any rank was asked to end."""
        return self.reason is not None

    @property
    def reason(self) -> str | None:
        """The signal and its rank, such as ``"SIGTERM on rank 2"``; None: there was no signal."""
        if (monitor := self._monitor()) is not None:
            for rank, name in monitor.announced(_SUBJECT).items():
                return f"{str(name)[:20]} on rank {rank}"
        return self._received

    @property
    def _unused(self) -> bool:
        """Whether its monitor is gone or closed, so that nothing reads the flag any more."""
        monitor = self._monitor()
        return monitor is None or monitor.is_closed

    def _exit_if_broken(self) -> None:
        """Ends the process soon if it got SIGTERM and training has failed; called after each of the two."""
        monitor = self._monitor()
        if self._terminated and monitor is not None and monitor.broken:
            end_after(_EXIT_WAIT, PREEMPTED)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler. It may run between any two instructions of the main thread: it takes no lock and never waits."""
        active = os.getpid() == self._process and not self._unused
        if active:
            if number == signal.SIGTERM:
                if self._terminated:
                    with contextlib.suppress(OSError):
                        os.write(2, _ENDED)
                    os._exit(PREEMPTED)
                self._terminated = True
                self._exit_if_broken()
            if self._received is None:
                _thread.start_new_thread(_log_first, (signal.Signals(number).name,))  # logging takes locks
            self.request(signal.Signals(number).name)
        previous = self._previous.get(number)
        while isinstance(owner := getattr(previous, "__self__", None), Preemption) and owner._unused:
            previous = owner._previous.get(number)
        if callable(previous):
            previous(number, frame)
        elif not active and previous == signal.SIG_DFL:
            # Nothing reads the flag in a forked child, such as a worker of a data loader, or when the pipe is gone.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _log_first(name: str) -> None:
    _LOG.warning(
        "%s: training is asked to stop after this step (pipe.stopping); a second SIGTERM ends this process at once, "
        "without a checkpoint",
        name,
    )
