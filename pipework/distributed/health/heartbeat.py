"""The threads of a monitor: they publish this rank's heartbeats, read those of the others, and report failures.

All of this goes through a store, apart from the channels for tensors, so that a failure is noticed while these are
blocked. Under the prefix of the given store every rank has four keys, and all share one:

    heartbeat/{rank}      every `beat` seconds: a counter, the rank's present call and action
    failure/{rank}        at most once: a failure of this rank, or of another one that this rank noticed
    messages/{rank}       what this rank has announced
    acknowledged/{rank}   this rank knows of a failure
    changed               written after each failure and message: the only key that is read every `poll` seconds

One thread exchanges data with the store. It may be blocked without end when the store's machine stops or the network is
cut. So a second thread, which calls nothing that can block, notices when the store gives no answers, and when an action
of this rank is stuck. A third one starts when another rank has failed, and ends the process if nothing else can.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from pipework.distributed.health import status
from pipework.distributed.health.detection_times import CappedClock
from pipework.distributed.health.errors import PipelineError, exit_code
from pipework.distributed.health.failure_detector import FailureDetector
from pipework.distributed.health.process_exit import end_now
from pipework.distributed.health.status import Beat, Call, PeerFailure
from pipework.distributed.health.stuck_detector import StuckDetector, is_in_collective

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.distributed.health.detection_times import DetectionTimes
    from pipework.distributed.health.monitor import HealthMonitor
    from pipework.distributed.health.process_calls import PipeCalls
    from pipework.distributed.health.progress import Progress
    from pipework.distributed.health.store_client import StoreClient

_LOG = logging.getLogger("pipework")

STORE_WAIT: Final = 2.0
"""Seconds that a program waits at most until the store has its last report."""

_POLL: Final = 0.05  # seconds
_LEAVES: Final = 0.3  # seconds after a failure elsewhere in which a rank leaves its call, unless a layer waits


class Heartbeat:
    """The state that a monitor shares with its threads, and the threads, which must not keep the monitor alive.

    What is to be published is put here as state, and the exchanging thread is woken. So a signal handler may do it at
    any moment, and after a broken connection everything is still here to be written again.

    Args:
        client: used by the exchanging thread alone, once it runs.
        rank: this rank.
        names: of all ranks.
        numbers: of all ranks in the job.
        progress: what this rank does.
        times: of detection.
        owner: the monitor, while it exists.
        calls: of the pipe, among those of all pipes of this process.
        lingers: see `HealthMonitor`.
    """

    def __init__(
        self,
        client: StoreClient,
        rank: int,
        names: list[str],
        numbers: Sequence[int],
        progress: Progress,
        times: DetectionTimes,
        owner: Callable[[], HealthMonitor | None],
        calls: PipeCalls,
        *,
        lingers: bool,
    ) -> None:
        self.rank = rank
        self.names = names
        self._numbers = numbers
        self.times = times
        self.detector = FailureDetector(rank, names, times)
        self.call = Call()
        self.own_report: PeerFailure | None = None  # a failure that this rank publishes
        self.report_written = threading.Event()
        self.failure: PeerFailure | None = None  # the first one elsewhere
        self.failed = threading.Event()
        self.messages: dict[str, Any] = {}
        self.received: dict[int, dict[str, Any]] = {}
        self.checks_often = False  # a connection was closed, and the reason is wanted soon

        self._client = client
        self._progress = progress
        self._owner = owner
        self._calls = calls
        self._lingers = lingers
        self._others_left = False
        self._others = [other for other in range(len(names)) if other != rank]
        limit = times.action_timeout
        self._stuck = None if limit is None else StuckDetector(rank, names[rank], limit, times.longest_gap)
        self._first_failure = threading.Lock()
        self._closing = threading.Event()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put is safe in signal handlers and finalizers
        self._rounds = 0  # completed exchanges with the store
        self._trouble = ""  # the last error of the store
        self._host = socket.gethostname()
        self._beats = 0
        self._changes = 0
        self._changed_seen: bytes | None = None
        self._messages_written: dict[str, Any] = {}
        self._acknowledged = False
        self._threads = [
            threading.Thread(target=target, name=f"pipework monitor {number}", daemon=True)
            for number, target in enumerate((self._exchange, self._guard))
        ]

    # ---- for the monitor ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Publishes the first heartbeat at once, so that ranks that start later find it, and starts the threads."""
        self._publish_beat()
        for thread in self._threads:
            _start(thread)

    def begin_call(self, what: str) -> None:
        """See `HealthMonitor.begin`."""
        self.call = self.call.begun(what)
        self._calls.begin()

    def end_call(self) -> None:
        """See `HealthMonitor.end`."""
        self.call = self.call.ended()
        # Who waits for this rank in another pipe is to see that it waited here, also in the last heartbeat.
        if self.failure is None or self.failure.kind != "disagreement":
            self._calls.end()

    def leave(self, process: int) -> bool:
        """Ends the threads; the last heartbeat says that this rank has left.

        Args:
            process: the one that the monitor belongs to.

        Returns:
            Whether the others were seen to leave, too, if it lingers.
        """
        if os.getpid() != process:  # a forked child has a copy of the connection, but it is not the one that leaves
            return False
        self._closing.set()
        self.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                # A thread that returns from PyTorch when the interpreter is gone aborts the process. On a busy machine
                # the last heartbeat may take long; waiting is useless only if the store gives no answers.
                answered = -1
                while thread.is_alive() and self._client.answered != answered:
                    answered = self._client.answered
                    thread.join(STORE_WAIT)
        return self._others_left

    def wake(self) -> None:
        """Has the exchanging thread run now."""
        self._wake.put(None)

    def publish(self, failure: PeerFailure) -> None:
        """Reports a failure to all ranks, and waits until it is written, but not for long: the program may end next."""
        if self._set_report(failure) and threading.current_thread() not in self._threads:
            self.report_written.wait(STORE_WAIT)

    def set_failure(self, failure: PeerFailure) -> bool:
        """Notes a failure elsewhere; returns False if one was known before."""
        with self._first_failure:
            if self.failure is not None:
                return False
            self.failure = failure
        self.failed.set()
        owner = self._owner()
        if owner is not None:
            owner.notify(failure)
        return True

    def declare(self, failure: PeerFailure) -> None:
        """Notes a failure that a thread of this rank has found, and reports it."""
        raised = self.call.inside  # before the callbacks: they may end the call, and the program raises the failure
        if self.set_failure(failure):
            if not raised:
                _LOG.error("%s. The next call of the pipe raises this", failure.text)
            self._set_report(failure)

    def _set_report(self, failure: PeerFailure) -> bool:
        """Has a failure published; returns False if there is a report already."""
        with self._first_failure:
            if self.own_report is not None:
                return False
            self.own_report = failure
        self.wake()
        return True

    def error(self) -> PipelineError:
        """The failure as an exception."""
        failure = self.failure
        if failure is None:
            raise RuntimeError("nothing has failed, so there is no error: check `failure` first")
        return self.as_error(failure, failure.text, own=failure.rank == self.rank)

    def as_error(self, failure: PeerFailure, text: str, *, own: bool = False) -> PipelineError:
        """A failure as an exception with a text; see `PipelineError`."""
        return PipelineError(
            text,
            rank=None if failure.rank is None else self._numbers[failure.rank],
            where=failure.where,
            kind=failure.kind,
            traceback_text=failure.traceback_text,
            own=own,
        )

    def end_process_if_stuck(self, seconds: float, break_collectives: Callable[[], None]) -> None:
        """See `HealthMonitor.end_process_if_stuck`."""
        if self.call.inside:
            arguments = (self.call.number, seconds, break_collectives)
            thread = threading.Thread(target=self._end_if_still_in, args=arguments, name="pipework end", daemon=True)
            self._threads.append(thread)
            _start(thread)

    # ---- threads ------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """The thread that reads from the store and writes to it."""
        next_beat = 0.0
        broken = False
        while True:
            leaving = self._closing.is_set()
            try:
                if broken:
                    self._client.reconnect()
                    broken = False
                now = time.monotonic()
                due = now >= next_beat
                self._publish_changes(again=due)
                if leaving:
                    self._publish_beat(left=True, reason=_last_exception())
                    self._client.read("changed")  # its answer means that the heartbeat is written
                    if self._lingers:
                        self._wait_for_others_to_leave()
                    return
                if due:
                    self._publish_beat()
                    next_beat = now + self.times.beat
                if self.failure is None:
                    self._read_changes()
                if self.failure is None and (due or self.checks_often or self.detector.any_late):
                    self._check_others()
                self._rounds += 1
            except Exception as error:  # of any kind: the store gives no answers
                self._trouble = f" ({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''})"
                broken = True
                if leaving:
                    return
                self._closing.wait(self.times.beat)
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=self.times.poll)

    def _guard(self) -> None:
        """The thread that notices that the exchanging one is blocked, and that this rank is stuck."""
        clock = CappedClock(self.times.longest_gap)
        rounds, silence = -1, 0.0
        while not self._closing.wait(self.times.poll):
            now = time.monotonic()
            elapsed = clock.elapsed(now)
            silence = silence + elapsed if self._rounds == rounds else 0.0
            rounds = self._rounds
            if self._stuck is not None and self.failure is None:
                call = self.call
                all_entered = self.detector.all_entered(call.number)
                stuck = self._stuck.check(now, self._progress, call, all_entered=all_entered)
                if stuck is not None:
                    self.declare(stuck)
            # The store may belong to a rank that has left normally; a rank that makes no further call can do without.
            if silence > self.times.detect and self.call.inside:
                text = f"the store at {self._client.address} has been out of reach for {silence:.1f} s, as seen by "
                self.declare(PeerFailure(None, "lost", text + self.names[self.rank] + self._trouble))

    def _end_if_still_in(self, number: int, seconds: float, break_collectives: Callable[[], None]) -> None:
        """The thread that ends the process if it is still in the call of that number after so many seconds.

        Other pipes may be made over the same groups of layers, so these are broken only if a layer waits in one.

        Like the other threads, this one knows only this object. If it held the last reference to a process group, it
        would destroy that while the interpreter exits, and this aborts the process.
        """
        begin = time.monotonic()
        broken = False
        while time.monotonic() < begin + seconds:
            if self._closing.wait(_POLL) or self.call.number != number or not self.call.inside:
                return
            if not broken and time.monotonic() > begin + _LEAVES and is_in_collective():
                broken = True
                break_collectives()
        error = self.error()
        text = f"{error}\nThis process is ended, because its present action does not come to an end:"
        end_now(text, exit_code(error))

    # ---- what the exchanging thread does ------------------------------------------------------------------------

    def _publish_beat(self, *, left: bool = False, reason: str = "") -> None:
        self._beats += 1
        action = status.describe_action(self._progress.action)
        beat = Beat(self._beats, left, self.call, action, os.getpid(), self._host, reason, self._calls.process.place)
        self._client.write(f"heartbeat/{self.rank}", status.write_beat(beat))

    def _publish_changes(self, *, again: bool) -> None:
        """Writes what is new: a failure, messages.

        Args:
            again: writes a failure once more, in case that something else was written into its key.
        """
        report, messages = self.own_report, dict(self.messages)
        if self.failure is not None and not self._acknowledged:
            self._client.write(f"acknowledged/{self.rank}", "1")
            self._acknowledged = True
        writes_report = report is not None and (again or not self.report_written.is_set())
        if report is not None and writes_report:
            self._client.write(f"failure/{self.rank}", status.write_failure(report))
        if messages != self._messages_written:
            self._client.write(f"messages/{self.rank}", json.dumps(messages))
        elif not writes_report:
            return
        self._changes += 1
        self._client.write("changed", f"{self.rank}:{self._changes}")
        self._client.read("changed")  # its answer means that the server has read all that came before
        self._messages_written = messages
        if writes_report:
            self.report_written.set()

    def _read_changes(self) -> None:
        """Reads failures and messages of the other ranks, if there are new ones."""
        changed = self._client.read("changed")
        if changed == self._changed_seen:
            return
        messages = self._client.read_many([f"messages/{rank}" for rank in self._others])
        reports = self._client.read_many([f"failure/{rank}" for rank in self._others])
        self._changed_seen = changed
        self.received = {rank: status.read_messages(raw) for rank, raw in zip(self._others, messages, strict=True)}
        failures = [status.read_failure(raw, len(self.names)) for raw in reports]
        # An exception is the cause of what else is noticed at the same time, such as connections that are closed.
        for failure in sorted((each for each in failures if each is not None), key=lambda each: each.kind != "error"):
            self.set_failure(failure)

    def _check_others(self) -> None:
        """Reads the heartbeats of the other ranks, and reports a failure that they show."""
        raw = self._client.read_many([f"heartbeat/{rank}" for rank in self._others])
        beats = {rank: status.read_beat(each) for rank, each in zip(self._others, raw, strict=True)}
        failure = self.detector.check(time.monotonic(), beats, self.call, self._calls.process.place)
        if failure is not None:
            self._read_changes()  # a failure that a rank has reported meanwhile is the cause
            self.declare(failure)

    def _wait_for_others_to_leave(self) -> None:
        """Waits a moment until all others have left, or know of a failure."""
        deadline = time.monotonic() + STORE_WAIT - 0.5
        waited_for = set(self._others)
        while waited_for and time.monotonic() < deadline:
            beats = {rank: status.read_beat(self._client.read(f"heartbeat/{rank}")) for rank in waited_for}
            waited_for -= {rank for rank, beat in beats.items() if beat is not None and beat.left}
            waited_for -= {rank for rank in waited_for if self._client.read(f"acknowledged/{rank}") is not None}
            time.sleep(0.02)
        self._others_left = not waited_for


def _start(thread: threading.Thread) -> None:
    """Starts a thread that does not keep what the caller's context variables hold."""
    contextvars.Context().run(thread.start)


def _last_exception() -> str:
    """The uncaught exception that ends the program, if there is one."""
    error = getattr(sys, "last_value", None)
    return status.describe_exception(error) if isinstance(error, BaseException) else ""
