"""Failure detection between processes: every rank shows signs of life, looks at the others', and hears of failures.

This is what the rest of the library and a user's program see; how it is done stands in `heartbeat`, what is judged in
`detector`.
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
from pipework.distributed.health.errors import PipelineError
from pipework.distributed.health.failure_detector import Times
from pipework.distributed.health.heartbeat import GRACE, Heartbeat, leave
from pipework.distributed.health.progress import Progress
from pipework.distributed.health.status import PeerFailure
from pipework.distributed.health.store_client import StoreClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger("pipework")
_BLAMED: Final = "blamed"


class HealthMonitor:
    """Watches the other ranks, and shows them that this one is alive.

    Begin when all ranks have met. A rank that is slow but alive is never taken for lost; one whose process is stopped,
    gone, or keeps the interpreter to itself for `detect` seconds is. A monitor ends with the program, or when it is
    dropped; a forked child has none.

    Args:
        store: through which all ranks talk; a connection of its own is made. Its keys are used once: give each use a
            prefix of its own (`torch.distributed.PrefixStore`).
        rank: this process.
        ranks: how many there are.
        beat: seconds between signs of life.
        detect: after how many seconds without a sign of life a rank is lost, or the store is.
        poll: seconds between looks for failures that others report.
        action_timeout: seconds that a single action of a collective call may take; None: as long as it likes. Waiting
            for another rank may take twice as long.
        join: seconds that a rank may take for its first sign of life.
        names: what a rank is called in messages, such as ``"rank 2 (stage 2)"``.
        hosts_store: the store ends with this process, which therefore waits a moment for others to read its last words.

    Attributes:
        progress: where the hot loop writes what it does.

    Raises:
        ValueError: times or ranks make no sense.

    Example:
        >>> from torch.distributed import HashStore
        >>> with HealthMonitor(HashStore(), rank=0, ranks=1) as monitor:
        ...     monitor.begin("training step")
        ...     monitor.progress.action = "optimizer"
        ...     monitor.end()
        >>> monitor.failure is None
        True
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
        hosts_store: bool = False,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be one of 0 to {ranks - 1}, got {rank}")
        times = Times(beat, detect, poll, join, action_timeout)
        self.progress = Progress()
        self._process = os.getpid()
        self._callbacks: list[Callable[[PeerFailure], None]] = []
        self._telling = threading.Lock()
        named = [names(each) for each in range(ranks)]
        self._heartbeat = Heartbeat(StoreClient(store), rank, named, self.progress, times, weakref.ref(self))
        self._heartbeat.hosts_store = hosts_store
        self._ending: weakref.finalize[Any, HealthMonitor] | None = None

    def start(self) -> None:
        """Begins to monitor and to be seen."""
        if self._ending is None:
            self._heartbeat.publish_beat()  # at once and here, so that whoever starts to monitor later finds it
            for thread in self._heartbeat.threads:
                thread.start()
            # Also called when the interpreter exits. The threads know the heartbeat only, so a dropped monitor ends
            # them.
            self._ending = weakref.finalize(self, leave, self._heartbeat, self._process)

    def close(self) -> None:
        """Tells the others that this rank has left in order, after as many calls as it made, and ends the threads."""
        if self._ending is not None:
            self._ending()

    def __enter__(self) -> HealthMonitor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, what: str) -> None:
        """This rank enters its next collective call.

        Args:
            what: a noun, such as ``"training step"``; the same on every rank.

        Raises:
            PipelineError: something has happened elsewhere already.
        """
        if self.failure is not None:
            raise self.error()
        if (record := self._heartbeat.record) is not None:
            text = f"this pipe has failed before, and cannot go on: {record.text}"
            raise PipelineError(text, rank=record.rank, where=record.where, traceback_text=record.traceback_text)
        self.progress.count += 1
        self._heartbeat.call = self._heartbeat.call.begun(what)

    def end(self) -> None:
        """This rank leaves the call."""
        self._heartbeat.call = self._heartbeat.call.ended()

    @property
    def failure(self) -> PeerFailure | None:
        """What happened first elsewhere; None: nothing that this rank knows of."""
        return self._heartbeat.failure

    @property
    def broken(self) -> bool:
        """Whether something has happened, elsewhere or here."""
        return self._heartbeat.failure is not None or self._heartbeat.record is not None

    @property
    def inside(self) -> int | None:
        """The number of the call in which this rank is; None: it is in none."""
        call = self._heartbeat.call
        return call.number if call.inside else None

    @property
    def current(self) -> str:
        """The call in which this rank is, or was last, such as ``"its 7th training step"``."""
        return self._heartbeat.call.current()

    def error(self) -> PipelineError:
        """The failure, to be raised."""
        return self._heartbeat.error()

    def bound(self, seconds: float) -> None:
        """Something has happened elsewhere: if this rank is in a call and does not leave it soon, the process is ended.

        Transfers can be ended from outside; a layer that does not return cannot.

        Args:
            seconds: so long it may still be in it.
        """
        self._heartbeat.bound(seconds)

    @property
    def has_seen_all(self) -> bool:
        """Whether all other ranks have shown a sign of life. Should one be gone later, its process can be named.

        It takes at most `poll` seconds after the last of them has begun to monitor.
        """
        return self._heartbeat.detector.has_seen_all

    def wait_for_failure(self, seconds: float) -> PeerFailure | None:
        """Waits until something has happened elsewhere.

        Args:
            seconds: at most.

        Returns:
            What has happened; None if nothing has.
        """
        self._heartbeat.failed.wait(seconds)
        return self.failure

    def blame(self, rank: int | None) -> None:
        """This rank is about to close its connections. Others will notice, and want to know whose fault it is.

        Args:
            rank: whose; None: not known.
        """
        if self.failure is None:
            self.announce(_BLAMED, rank)

    def closed(self, rank: int | None, patience: float = 1.0, seen: str = "") -> PeerFailure:
        """A connection was closed: finds out why.

        Who closes one on purpose has blamed somebody before, mostly itself, and tells the whole story soon. Who was
        killed has told nobody anything.

        Args:
            rank: the other end; None: not known which of several.
            patience: seconds within which a rank that lives says something.
            seen: where it was noticed, such as ", seen by rank 0 at F of stage 0".

        Returns:
            What happened.
        """
        heartbeat = self._heartbeat
        heartbeat.looks_often = True
        begin = time.monotonic()
        end = begin + heartbeat.times.detect + patience
        while self.wait_for_failure(heartbeat.times.poll / 2) is None:
            now = time.monotonic()
            culprit, tells = (
                (heartbeat.detector.silent(2.5 * heartbeat.times.beat), False) if rank is None else self._culprit(rank)
            )
            if culprit is not None and now > (end if tells else begin + patience):
                return self.lost(culprit, seen)
            if now > end:
                failure = PeerFailure(None, "lost", "a connection was closed, and no rank says why")
                heartbeat.fail(failure)
        assert self.failure is not None
        return self.failure

    def _culprit(self, rank: int) -> tuple[int | None, bool]:
        """Who is to blame that a rank has closed its connections, and whether somebody who lives will tell why."""
        blamed = self.announced(_BLAMED)
        passed = {rank, self._heartbeat.rank}
        while rank in blamed:
            then = blamed[rank]
            if not isinstance(then, int) or not 0 <= then < len(self._heartbeat.names) or then == rank:
                return rank, True
            if then in passed:  # they blame each other
                return rank, False
            passed.add(then)
            rank = then
        return rank, False

    def on_failure(self, callback: Callable[[PeerFailure], None]) -> None:
        """Has a function called once, as soon as something has happened elsewhere.

        Args:
            callback: called on the thread that notices, mostly one of the monitor's; at once if it has happened
                already.
        """
        with self._telling:
            self._callbacks.append(callback)
        if self.failure is not None:
            self.tell(self.failure)

    def report(self, error: BaseException, where: str | None = None) -> None:
        """Tells all the others that this rank has failed, with the whole traceback, before the program can end.

        An error that came from another rank is not told again.

        Args:
            error: what was raised here.
            where: the place, such as ``"stage 1, micro-batch 3, action F"``; None: not known.
        """
        if isinstance(error, PipelineError) and self.failure is not None:
            return
        heartbeat = self._heartbeat
        place = f" in {where}" if where else ""
        text = f"{heartbeat.names[heartbeat.rank]} failed{place}: {status.describe_exception(error)}"
        self._publish(PeerFailure(heartbeat.rank, "error", text, where, status.describe_traceback(error)))

    def lost(self, rank: int, seen: str = "") -> PeerFailure:
        """A rank is gone, as this one noticed by itself: the others are told.

        Args:
            rank: which one.
            seen: where it was noticed.

        Returns:
            What happened: this, or what was known before.
        """
        heartbeat = self._heartbeat
        text = (
            f"{heartbeat.names[rank]} is gone: its connections were closed{seen}; {heartbeat.detector.last_words(rank)}"
        )
        failure = PeerFailure(rank, "lost", text)
        if heartbeat.fail(failure):
            self._publish(failure)
        return heartbeat.failure or failure

    def announce(self, subject: str, value: Any = True) -> None:
        """Tells something to all ranks within `poll` seconds. May be called by signal handlers: nothing here waits.

        Args:
            subject: what it is about.
            value: anything that JSON can express.
        """
        json.dumps(value)  # an error belongs here, not to the thread that writes it
        self._heartbeat.said[subject] = value
        self._heartbeat.say_soon()

    def announced(self, subject: str) -> dict[int, Any]:
        """What the ranks that announced something about a subject have said, this rank included."""
        heartbeat = self._heartbeat
        said: Mapping[int, Mapping[str, Any]] = {**heartbeat.heard, heartbeat.rank: heartbeat.said}
        return {rank: each[subject] for rank, each in sorted(said.items()) if subject in each}

    def _publish(self, failure: PeerFailure) -> None:
        """Waits until it is written, but not for long: the program may end with the next line."""
        heartbeat = self._heartbeat
        if (
            self._process == os.getpid()
            and self._ending is not None
            and self._ending.alive
            and heartbeat.record is None
        ):
            heartbeat.record = failure
            heartbeat.say_soon()
            if threading.current_thread() not in heartbeat.threads:
                heartbeat.written.wait(GRACE)

    def tell(self, failure: PeerFailure) -> None:
        """Calls the functions that want to know of a failure; each of them once."""
        with self._telling:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(failure)
            except Exception:
                _LOG.exception("a function that was to be told of a failure has failed itself")
