"""Failure detection between processes: `HealthMonitor` shows that this rank is alive, and notices that others are not.

All of this goes through a store, apart from the channels for tensors, so that a failure is noticed while these are
blocked. Under the prefix of the given store every rank has one key, and all share another one:

    heartbeat/{rank}   every `beat` seconds: a counter, the rank's call and action, what it has announced, and at most
                       one failure, of this rank or of another one that this rank noticed
    changed            written after a heartbeat with a new announcement or failure, so that all read it within `poll`
                       seconds

One thread exchanges data with the store. It may be blocked without end when the store's machine stops or the network is
cut. So a second thread, which calls nothing that can block, notices when the store gives no answers, and when an action
of this rank is stuck. A third one starts when another rank has failed, and ends the process if nothing else can.

What is to be published is an attribute, and the exchanging thread is woken. So a signal handler may publish at any
moment, and after a broken connection everything is still there to be written again.
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
import weakref
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from pipework.distributed.health import status
from pipework.distributed.health.errors import PipelineError, exit_code
from pipework.distributed.health.failure_detector import (
    CappedClock,
    DetectionTimes,
    FailureDetector,
    ProcessCalls,
    Progress,
    StuckDetector,
    is_in_collective,
)
from pipework.distributed.health.process_exit import end_now
from pipework.distributed.health.status import Beat, Call, PeerFailure
from pipework.distributed.health.store_client import StoreClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger("pipework")

STORE_WAIT: Final = 2.0
"""Seconds that a program waits at most until the store has its last report."""

_CULPRIT: Final = "culprit"  # the subject of a message
_POLL: Final = 0.05  # seconds
_LEAVES: Final = 0.3  # seconds after a failure elsewhere in which a rank leaves its call, unless a layer waits


class HealthMonitor:
    """Publishes heartbeats of this rank, checks those of the others, and tells this rank what failed elsewhere.

    All ranks make one at about the same time. A rank that is slow but alive is never taken for lost. A rank is lost if
    its process is stopped, has ended, or blocks the interpreter for `detect` seconds. The threads keep the monitor
    until it is closed; they must not keep the pipe, so callbacks refer to the pipe weakly. A forked child has no
    monitor.

    Args:
        store: through which all ranks communicate; the monitor makes a connection of its own. The keys are used once:
            give each monitor its own prefix (`torch.distributed.PrefixStore`).
        rank: this process.
        names: of all ranks in messages, such as ``{2: "rank 2 (stage 2)"}``.
        times: see `DetectionTimes`.
        calls: of all pipes of this process; None: there are no others.
        lingers: closing waits a moment until the others leave, too: the store ends with this process, or what it has
            sent may be on its way.

    Attributes:
        progress: where the hot loop writes what it does.
        failure: the first failure elsewhere; None: this rank knows of none.
        own_report: a failure that this rank publishes.

    Example:
        >>> from torch.distributed import HashStore
        >>> monitor = HealthMonitor(HashStore(), 0, {0: "rank 0"})
        >>> monitor.start()
        >>> monitor.begin("training step")
        >>> monitor.progress.action = "optimizer"
        >>> monitor.end()
        >>> monitor.failure is None
        True
        >>> left = monitor.close()
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Mapping[int, str],
        times: DetectionTimes | None = None,
        *,
        calls: ProcessCalls | None = None,
        lingers: bool = False,
    ) -> None:
        self.progress = Progress()
        self.failure: PeerFailure | None = None
        self.own_report: PeerFailure | None = None
        self._times = times or DetectionTimes()
        self._rank = rank
        self._names = names
        self._calls = calls or ProcessCalls()
        self._pipe = self._calls.add()
        self._lingers = lingers
        self._process = os.getpid()
        self._client = StoreClient(store)  # used by the exchanging thread alone, once it runs
        self._others = [other for other in names if other != rank]
        self._detector = FailureDetector(rank, self._names, self._times, self._calls)
        self._stuck = StuckDetector(rank, names[rank], self._times) if self._times.action_timeout is not None else None
        self._call = Call()
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._report_written = threading.Event()
        self._closing = threading.Event()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put is safe in signal handlers and finalizers
        self._messages: dict[str, Any] = {}
        self._told: tuple[Any, ...] = {}, None, False  # the news that all ranks can read
        self._others_left = False
        self._beats = self._rounds = 0  # rounds: completed exchanges with the store
        self._changed_seen: bytes | None = None
        self._trouble = ""  # the last error of the store
        self._host = socket.gethostname()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Publishes the first heartbeat at once, so that ranks that start later find it, and starts the threads."""
        self._publish()
        # A thread of the monitor may drop the last reference to the pipe, and so destroy its process groups. If the
        # interpreter ended meanwhile, that would abort the process. At the exit the monitor lives as long as its
        # threads, and this waits for them.
        weakref.finalize(self, _call_if_alive, weakref.WeakMethod(self.close))
        for number, target in enumerate((self._exchange, self._guard)):
            self._start(target, f"pipework monitor {number}")

    def close(self) -> bool:
        """Tells the others that this rank has left normally, after as many calls as it made, and ends the threads.

        Returns:
            Whether the others were seen to leave, too, if it lingers.
        """
        if os.getpid() != self._process:  # a forked child has a copy of the connection, but does not leave
            return False
        self._closing.set()
        self._wake.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                # A thread that returns from PyTorch when the interpreter is gone aborts the process. On a busy machine
                # the last heartbeat may take long; waiting is useless only if the store gives no answers.
                answered = -1
                while thread.is_alive() and self._client.answered != answered:
                    answered = self._client.answered
                    thread.join(STORE_WAIT)
        return self._others_left

    @property
    def is_closed(self) -> bool:
        """Whether it has been closed."""
        return self._closing.is_set()

    # ---- calls that all ranks make ------------------------------------------------------------------------------

    def begin(self, what: str) -> None:
        """This rank enters its next collective call.

        Args:
            what: a noun, such as ``"training step"``; the same on every rank.

        Raises:
            PipelineError: another rank has failed before, or this one has.
        """
        if self.broken:
            self._calls.refuse(self._pipe)
        if self.failure is not None:
            raise self.error()
        if (report := self.own_report) is not None:
            raise self._as_error(report, f"this pipe has failed before, and cannot go on: {report.text}")
        self.progress.count += 1
        self._call = self._call.begun(what)
        self._calls.begin(self._pipe)

    def end(self) -> None:
        """This rank leaves the call."""
        self._call = self._call.ended()
        self._calls.end(failed=self.broken)

    @property
    def current(self) -> str:
        """The call in which this rank is, or was last, such as ``"call 7 (training step)"``."""
        return self._call.text()

    @property
    def has_seen_all(self) -> bool:
        """Whether a heartbeat of every other rank was received, so that a rank that is lost later can be described."""
        return self._detector.has_seen_all

    # ---- failures of other ranks --------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether another rank has failed, or this one."""
        return self.failure is not None or self.own_report is not None

    def error(self) -> PipelineError:
        """The failure as an exception."""
        assert self.failure is not None
        return self._as_error(self.failure, self.failure.text)

    def _as_error(self, failure: PeerFailure, text: str) -> PipelineError:
        return PipelineError(**asdict(replace(failure, text=text)), own=failure.rank == self._rank)

    def wait_for_failure(self, seconds: float) -> PeerFailure | None:
        """Waits until another rank has failed.

        Returns:
            The failure; None if there was none in that time.
        """
        self._failed.wait(seconds)
        return self.failure

    def on_failure(self, callback: Callable[[], object]) -> None:
        """Has a function called once, as soon as another rank has failed.

        Args:
            callback: called on the thread that notices the failure, mostly one of the monitor's; at once if there was a
                failure before.
        """
        with self._lock:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        callback()

    def set_failure(self, failure: PeerFailure) -> bool:
        """Notes a failure elsewhere; returns False if one was known before."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = failure
        self._failed.set()
        for callback in self._callbacks:
            try:
                callback()
            except Exception:  # the failure is to be reported all the same
                _LOG.exception("a function that was registered by on_failure has failed itself")
        return True

    def declare(self, failure: PeerFailure) -> None:
        """Notes a failure that this rank has found, and reports it."""
        raised = self._call.inside  # before the callbacks: they may end the call, and the program raises the failure
        if self.set_failure(failure):
            if not raised:
                _LOG.error("%s. The next call of the pipe raises this", failure.text)
            self._tell(failure)

    def end_process_if_stuck(self, seconds: float, break_collectives: Callable[[], None]) -> None:
        """After a failure elsewhere: ends the process if this rank does not leave its present call in time.

        Transfers can be ended by another thread; a layer that does not return cannot.

        Args:
            seconds: the time until then.
            break_collectives: ends the collectives of layers, for good; called if the rank waits in one meanwhile.
        """
        if self._call.inside:
            self._start(self._end_if_still_in, "pipework end", self._call.number, seconds, break_collectives)

    # ---- failures that this rank reports ------------------------------------------------------------------------

    def report(self, error: BaseException, where: str | None = None) -> None:
        """Tells all others that this rank has failed, with the whole traceback, before the program can end.

        An error that came from another rank is not reported again.

        Args:
            error: what was raised here.
            where: the place, such as ``"stage 1, micro-batch 3, action F"``; None: not known.
        """
        if isinstance(error, PipelineError) and self.failure is not None:
            return
        place = f" in {where}" if where else ""
        text = f"{self._names[self._rank]} failed{place}: {status.describe_exception(error)}"
        self._tell(PeerFailure(self._rank, "error", text, where, status.describe_traceback(error)))

    def announce_culprit(self, rank: int | None) -> None:
        """This rank is about to close its connections: tells the others, which will notice, because of which rank.

        Args:
            rank: that has failed; None: not known.
        """
        if self.failure is None:
            self.announce(_CULPRIT, rank)

    def explain_disconnect(
        self, rank: int | None, patience: float = 1.0, seen: str = "", cause: BaseException | None = None
    ) -> PeerFailure:
        """A connection was closed: finds out why.

        A rank that closes its connections on purpose has announced the culprit before, mostly itself. A report of that
        rank, or of one that was connected to the culprit, follows soon. A rank that was killed has announced nothing.
        Two ranks that announce each other have lost each other, as when the network between them is cut.

        Args:
            rank: the other end; None: not known which of several.
            patience: seconds within which a rank that lives announces something.
            seen: where it was noticed, such as ", seen by rank 0 at F of stage 0".
            cause: how PyTorch noticed it.

        Returns:
            The failure behind it.
        """
        begin, longest = time.monotonic(), self._times.detect + patience
        while self.wait_for_failure(self._times.poll / 2) is None:
            seconds = time.monotonic() - begin
            if rank is None:
                lost = self._detector.most_silent(2.5 * self._times.beat)
            else:
                culprit = self.announced(_CULPRIT).get(rank, self._rank)
                report_follows = culprit != self._rank and seconds < longest
                lost = None if report_follows else culprit if culprit in self._others else rank
            if lost is not None and seconds > patience:
                last_seen = self._detector.last_seen(lost)
                text = f"{self._names[lost]} is gone: its connections were closed{seen}; {last_seen}"
                failure = PeerFailure(lost, "lost", text)
                if self.set_failure(failure):  # the caller raises it: nothing is to be logged
                    self._tell(failure)
            elif seconds > longest:
                text = "a connection was closed, and no rank says why"
                self.set_failure(PeerFailure(None, "lost", f"{text}: {cause}" if cause else text))
        assert self.failure is not None
        return self.failure

    def _tell(self, failure: PeerFailure) -> None:
        """Reports a failure to all ranks; waits until it is written, but not for long: the program may end next."""
        if self._process != os.getpid() or not self._threads or self.is_closed:
            return
        with self._lock:
            if self.own_report is not None:
                return
            self.own_report = failure
        self._wake.put(None)
        if threading.current_thread() not in self._threads:
            self._report_written.wait(STORE_WAIT)

    # ---- messages -----------------------------------------------------------------------------------------------

    def announce(self, subject: str, value: Any = True) -> None:
        """Sends a message to all ranks, within `poll` seconds. Signal handlers may call this: nothing here waits.

        Args:
            subject: a later message of the same subject replaces it.
            value: anything that JSON can express.
        """
        json.dumps(value)  # an error belongs here, not to the thread that writes it
        self._messages[subject] = value
        self._wake.put(None)

    def announced(self, subject: str) -> dict[int, Any]:
        """The messages about a subject, by the rank that sent them, this rank included."""
        own = {self._rank: self._messages[subject]} if subject in self._messages else {}
        return dict(sorted({**self._detector.announced(subject), **own}.items()))

    # ---- threads ------------------------------------------------------------------------------------------------

    def _start(self, target: Callable[..., None], name: str, *arguments: Any) -> None:
        """Starts a thread that does not keep what the caller's context variables hold."""
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        contextvars.Context().run(thread.start)

    def _exchange(self) -> None:
        """The thread that reads from the store and writes to it."""
        next_beat = 0.0
        broken = False
        while True:
            leaving = self.is_closed
            try:
                if broken:
                    self._client.reconnect()
                    broken = False
                now = time.monotonic()
                due = now >= next_beat
                if leaving:
                    self._publish(left=True)
                    if self._lingers:
                        self._wait_for_others_to_leave()
                    return
                if due or self._told != self._news():
                    self._publish()
                    next_beat = now + self._times.beat
                if self.failure is None:
                    changed = self._client.read("changed")
                    if due or changed != self._changed_seen or not self.has_seen_all or self._detector.any_late:
                        self._read_others()
                        self._changed_seen = changed
                self._rounds += 1
            except Exception as error:  # of any kind: the store gives no answers
                self._trouble = f" ({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''})"
                broken = True
                if leaving:
                    return
                self._closing.wait(self._times.beat)
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=self._times.poll)

    def _guard(self) -> None:
        """The thread that notices that the exchanging one is blocked, and that this rank is stuck."""
        clock = CappedClock(self._times.longest_gap)
        rounds, silence = -1, 0.0
        while not self._closing.wait(self._times.poll):
            now = time.monotonic()
            elapsed = clock.elapsed(now)
            silence = silence + elapsed if self._rounds == rounds else 0.0
            rounds = self._rounds
            if self._stuck is not None and self.failure is None:
                call = self._call
                stuck = self._stuck.check(now, self.progress, call, all_entered=self._detector.all_entered(call.number))
                if stuck is not None:
                    self.declare(stuck)
            # The store may belong to a rank that has left normally; a rank that makes no further call can do without.
            if silence > self._times.detect and self._call.inside:
                text = f"the store at {self._client.address} has been out of reach for {silence:.1f} s, as seen by "
                self.declare(PeerFailure(None, "lost", text + self._names[self._rank] + self._trouble))

    def _end_if_still_in(self, number: int, seconds: float, break_collectives: Callable[[], None]) -> None:
        """The thread that ends the process if it is still in the call of that number after so many seconds.

        Other pipes may be made over the same groups of layers, so these are broken only if a layer waits in one.

        Like the other threads, this one knows only this object. If it held the last reference to a process group, it
        would destroy that while the interpreter exits, and this aborts the process.
        """
        begin = time.monotonic()
        broken = False
        while time.monotonic() < begin + seconds:
            if self._closing.wait(_POLL) or self._call.number != number or not self._call.inside:
                return
            if not broken and time.monotonic() > begin + _LEAVES and is_in_collective():
                broken = True
                break_collectives()
        error = self.error()
        text = f"{error}\nThis process is ended, because its present action does not come to an end:"
        end_now(text, exit_code(error))

    # ---- what the exchanging thread does ------------------------------------------------------------------------

    def _news(self) -> tuple[dict[str, Any], PeerFailure | None, bool]:
        """What the others are to read at once."""
        return dict(self._messages), self.own_report, self.failure is not None

    def _publish(self, *, left: bool = False) -> None:
        """Writes the heartbeat, and if it says something new or is the last one, waits until all can read it."""
        news = self._news()
        error = getattr(sys, "last_value", None) if left else None  # the uncaught exception that ends the program
        self._beats += 1
        # Read before `_call`: if a call of this pipe begins in between, `_call` is newer, which accuses nobody.
        place = self._calls.place(self._pipe)
        reason = status.describe_exception(error) if isinstance(error, BaseException) else ""
        action = status.describe_action(self.progress.action)
        beat = Beat(self._beats, left, self._call, action, os.getpid(), self._host, reason, place, *news)
        self._client.write(f"heartbeat/{self._rank}", status.write_beat(beat))
        if news != self._told:
            self._client.write("changed", f"{self._rank}:{self._beats}")
        if news != self._told or left:
            self._client.read("changed")  # its answer means that the server has read all that came before
        self._told = news
        if news[1] is not None:
            self._report_written.set()

    def _read_others(self) -> None:
        """Reads the heartbeats of the other ranks, and the failures that they report or show."""
        raw = self._client.read_many([f"heartbeat/{rank}" for rank in self._others])
        beats = {rank: status.read_beat(each) for rank, each in zip(self._others, raw, strict=True)}
        reports = [beat.failure for beat in beats.values() if beat is not None and beat.failure is not None]
        # An exception is the cause of what else is noticed at the same time, such as connections that are closed.
        for failure in sorted(reports, key=lambda each: each.kind != "error"):
            if failure.rank is None or failure.rank in self._names:
                self.set_failure(failure)
        if self.failure is None and (shown := self._detector.check(time.monotonic(), beats, self._call)) is not None:
            self.declare(shown)

    def _wait_for_others_to_leave(self) -> None:
        """Waits a moment until all others have left, or know of a failure."""
        deadline = time.monotonic() + STORE_WAIT - 0.5
        waited_for = set(self._others)
        while waited_for and time.monotonic() < deadline:
            beats = {rank: status.read_beat(self._client.read(f"heartbeat/{rank}")) for rank in waited_for}
            waited_for -= {rank for rank, beat in beats.items() if beat is not None and (beat.left or beat.knows)}
            time.sleep(0.02)
        self._others_left = not waited_for


def _call_if_alive(method: weakref.WeakMethod[Callable[[], object]]) -> None:
    if (call := method()) is not None:
        call()
