"""Failure detection between processes: `HealthMonitor` shows that this rank is alive, and notices that others are not.

The parts: `heartbeat` has the threads, which notice what follows; `failure_detector` decides which other rank is lost;
`stuck_detector` notices that an action of this rank hangs; `status` has the messages that ranks exchange.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from pipework.distributed.health import status
from pipework.distributed.health.detection_times import DetectionTimes
from pipework.distributed.health.errors import PipelineError
from pipework.distributed.health.heartbeat import Heartbeat
from pipework.distributed.health.process_calls import PipeCalls, ProcessCalls
from pipework.distributed.health.progress import Progress
from pipework.distributed.health.status import PeerFailure
from pipework.distributed.health.store_client import StoreClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger("pipework")
_CULPRIT: Final = "culprit"


class HealthMonitor:
    """Publishes heartbeats of this rank, checks those of the others, and tells this rank what failed elsewhere.

    All ranks make one at about the same time. A rank that is slow but alive is never taken for lost. A rank is lost if
    its process is stopped, has ended, or blocks the interpreter for `detect` seconds. A monitor ends with the program,
    or when it is dropped; a forked child has none.

    Args:
        store: through which all ranks communicate; the monitor makes a connection of its own. The keys are used once:
            give each monitor its own prefix (`torch.distributed.PrefixStore`).
        rank: this process.
        ranks: how many there are.
        beat: seconds between heartbeats.
        detect: seconds without a heartbeat after which a rank is lost; without an answer, after which the store is.
        poll: seconds between two reads of what other ranks report.
        action_timeout: seconds that a single action of a collective call may take; None: no limit. Waiting for another
            rank may take twice as long.
        join: seconds until a rank's first heartbeat.
        names: the name of a rank in messages, such as ``"rank 2 (stage 2)"``.
        numbers: of all ranks in the job; None: they are those of the monitor.
        calls: of the pipe, among those of all pipes of this process; None: it has one.
        lingers: closing waits a moment until the others leave, too: the store ends with this process, or what it has
            sent may be on its way.

    Attributes:
        progress: where the hot loop writes what it does.

    Raises:
        ValueError: the times contradict each other, or there is no such rank.

    Example:
        >>> from torch.distributed import HashStore
        >>> monitor = HealthMonitor(HashStore(), rank=0, ranks=1)
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
        ranks: int,
        *,
        beat: float = 0.5,
        detect: float = 10.0,
        poll: float = 0.1,
        action_timeout: float | None = None,
        join: float = 300.0,
        names: Callable[[int], str] = "rank {}".format,
        numbers: Sequence[int] | None = None,
        calls: PipeCalls | None = None,
        lingers: bool = False,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be one of 0 to {ranks - 1}, got {rank}")
        times = DetectionTimes(beat, detect, poll, join, action_timeout)
        self.progress = Progress()
        self._process = os.getpid()
        self._callbacks: list[Callable[[PeerFailure], None]] = []
        self._callbacks_lock = threading.Lock()
        self._heartbeat = Heartbeat(
            StoreClient(store),
            rank,
            [names(each) for each in range(ranks)],
            numbers or range(ranks),
            self.progress,
            times,
            weakref.ref(self),
            calls or ProcessCalls().of_pipe(1),
            lingers=lingers,
        )
        self._leave: weakref.finalize[Any, HealthMonitor] | None = None

    def start(self) -> None:
        """Begins to publish heartbeats and to check those of the others."""
        if self._leave is None:
            self._heartbeat.start()
            # Also called when the interpreter exits. The threads know the heartbeat only, so a dropped monitor ends
            # them.
            self._leave = weakref.finalize(self, self._heartbeat.leave, self._process)

    def close(self) -> bool:
        """Tells the others that this rank has left normally, after as many calls as it made, and ends the threads.

        Returns:
            Whether the others were seen to leave, too, if it lingers.
        """
        return self._leave is not None and bool(self._leave())

    # ---- calls that all ranks make ------------------------------------------------------------------------------

    def begin(self, what: str) -> None:
        """This rank enters its next collective call.

        Args:
            what: a noun, such as ``"training step"``; the same on every rank.

        Raises:
            PipelineError: another rank has failed before, or this one has.
        """
        if self.failure is not None:
            raise self.error()
        if (report := self._heartbeat.own_report) is not None:
            raise self._heartbeat.as_error(report, f"this pipe has failed before, and cannot go on: {report.text}")
        self.progress.count += 1
        self._heartbeat.begin_call(what)

    def end(self) -> None:
        """This rank leaves the call."""
        self._heartbeat.end_call()

    @property
    def current(self) -> str:
        """The call in which this rank is, or was last, such as ``"its 7th training step"``."""
        return self._heartbeat.call.current()

    @property
    def has_seen_all(self) -> bool:
        """Whether a heartbeat of every other rank was received, so that a rank that is lost later can be described.

        It takes at most `poll` seconds after the last of them has started its monitor.
        """
        return self._heartbeat.detector.has_seen_all

    # ---- failures of other ranks --------------------------------------------------------------------------------

    @property
    def failure(self) -> PeerFailure | None:
        """The first failure elsewhere; None: this rank knows of none."""
        return self._heartbeat.failure

    @property
    def broken(self) -> bool:
        """Whether another rank has failed, or this one."""
        return self._heartbeat.failure is not None or self._heartbeat.own_report is not None

    def error(self) -> PipelineError:
        """The failure as an exception."""
        return self._heartbeat.error()

    def wait_for_failure(self, seconds: float) -> PeerFailure | None:
        """Waits until another rank has failed.

        Returns:
            The failure; None if there was none in that time.
        """
        self._heartbeat.failed.wait(seconds)
        return self.failure

    def on_failure(self, callback: Callable[[PeerFailure], None]) -> None:
        """Has a function called once, as soon as another rank has failed.

        Args:
            callback: called on the thread that notices the failure, mostly one of the monitor's; at once if there was a
                failure before.
        """
        with self._callbacks_lock:
            self._callbacks.append(callback)
        if self.failure is not None:
            self.notify(self.failure)

    def notify(self, failure: PeerFailure) -> None:
        """Calls the functions that wait for a failure, each of them once."""
        with self._callbacks_lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(failure)
            except Exception:
                _LOG.exception("a function that was registered by on_failure has failed itself")

    def end_process_if_stuck(self, seconds: float, break_collectives: Callable[[], None]) -> None:
        """After a failure elsewhere: ends the process if this rank does not leave its present call in time.

        Transfers can be ended by another thread; a layer that does not return cannot.

        Args:
            seconds: the time until then.
            break_collectives: ends the collectives of layers, for good; called if the rank waits in one meanwhile.
        """
        self._heartbeat.end_process_if_stuck(seconds, break_collectives)

    # ---- failures that this rank reports ------------------------------------------------------------------------

    def report(self, error: BaseException, where: str | None = None, *, call: int = 0, counts: bool = False) -> None:
        """Tells all others that this rank has failed, with the whole traceback, before the program can end.

        An error that came from another rank is not reported again.

        Args:
            error: what was raised here.
            where: the place, such as ``"stage 1, micro-batch 3, action F"``; None: not known.
            call: see `PeerFailure`.
            counts: likewise.
        """
        if isinstance(error, PipelineError) and self.failure is not None:
            return
        heartbeat = self._heartbeat
        place = f" in {where}" if where else ""
        text = f"{heartbeat.names[heartbeat.rank]} failed{place}: {status.describe_exception(error)}"
        traceback_text = status.describe_traceback(error)
        self._publish(PeerFailure(heartbeat.rank, "error", text, where, traceback_text, call, counts))

    def declare_lost(self, rank: int, seen: str = "") -> PeerFailure:
        """Tells all others that a rank is gone, as this one has noticed.

        Returns:
            This failure, or one that was known before.
        """
        heartbeat = self._heartbeat
        name, last_seen = heartbeat.names[rank], heartbeat.detector.last_seen(rank)
        failure = PeerFailure(rank, "lost", f"{name} is gone: its connections were closed{seen}; {last_seen}")
        if heartbeat.set_failure(failure):
            self._publish(failure)
        return heartbeat.failure or failure

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

        A rank that closes its connections on purpose has announced the culprit before, mostly itself, and its report
        follows soon. A rank that was killed has announced nothing.

        Args:
            rank: the other end; None: not known which of several.
            patience: seconds within which a rank that lives announces something.
            seen: where it was noticed, such as ", seen by rank 0 at F of stage 0".
            cause: how PyTorch noticed it.

        Returns:
            The failure behind it.
        """
        heartbeat, times = self._heartbeat, self._heartbeat.times
        heartbeat.checks_often = True
        begin = time.monotonic()
        end = begin + times.detect + patience
        while self.wait_for_failure(times.poll / 2) is None:
            now = time.monotonic()
            if rank is None:
                culprit, reports = heartbeat.detector.most_silent(2.5 * times.beat), False
            else:
                culprit, reports = self._culprit(rank)
            if culprit is not None and now > (end if reports else begin + patience):
                return self.declare_lost(culprit, seen)
            if now > end:
                text = "a connection was closed, and no rank says why"
                heartbeat.set_failure(PeerFailure(None, "lost", f"{text}: {cause}" if cause else text))
        assert self.failure is not None
        return self.failure

    def _culprit(self, rank: int) -> tuple[int | None, bool]:
        """Because of which rank another one has closed its connections, and whether a report of it will come."""
        culprits = self.announced(_CULPRIT)
        passed = {rank, self._heartbeat.rank}
        while rank in culprits:
            then = culprits[rank]
            if not isinstance(then, int) or not 0 <= then < len(self._heartbeat.names) or then == rank:
                return rank, True
            if then in passed:  # they name each other
                return rank, False
            passed.add(then)
            rank = then
        return rank, False

    def _publish(self, failure: PeerFailure) -> None:
        if self._process == os.getpid() and self._leave is not None and self._leave.alive:
            self._heartbeat.publish(failure)

    # ---- messages -----------------------------------------------------------------------------------------------

    def announce(self, subject: str, value: Any = True) -> None:
        """Sends a message to all ranks, within `poll` seconds. Signal handlers may call this: nothing here waits.

        Args:
            subject: a later message of the same subject replaces it.
            value: anything that JSON can express.
        """
        json.dumps(value)  # an error belongs here, not to the thread that writes it
        self._heartbeat.messages[subject] = value
        self._heartbeat.wake()

    def announced(self, subject: str) -> dict[int, Any]:
        """The messages about a subject, by the rank that sent them, this rank included."""
        heartbeat = self._heartbeat
        messages: Mapping[int, Mapping[str, Any]] = {**heartbeat.received, heartbeat.rank: heartbeat.messages}
        return {rank: each[subject] for rank, each in sorted(messages.items()) if subject in each}
