"""How a monitor sees and is seen: its threads, and what it shares with them.

All goes through a store, beside the channels for tensors, so that a failure is seen although these are blocked. Under
the prefix of the store that is given there are, for every rank:

    beat/{rank}       every `beat` seconds: a counter that moves, where the rank is, what it does
    failure/{rank}    at most once: what happened to this rank, or to another one as seen by this rank
    said/{rank}       what this rank announced
    heard/{rank}      this rank knows of a failure
    bell              changes whenever one of the last two was written: the one key to look at every `poll` seconds

One thread talks with the store, and may be blocked for ever when the store's machine stops or the network is cut. So a
second one, which touches nothing that can block, notices when the first one gets no answers. A third one comes when
something has happened elsewhere, and ends the process if nothing else can.
"""

from __future__ import annotations

import contextlib
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
from pipework.distributed.health.errors import PipelineError, exit_code
from pipework.distributed.health.failure_detector import FailureDetector, Stopwatch, Times
from pipework.distributed.health.process_exit import end_now
from pipework.distributed.health.progress import Overdue
from pipework.distributed.health.status import Beat, Call, PeerFailure

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.distributed.health.monitor import HealthMonitor
    from pipework.distributed.health.progress import Progress
    from pipework.distributed.health.store_client import StoreClient

_LOG = logging.getLogger("pipework")

GRACE: Final = 2.0
"""Seconds that a program waits at most for the store to take a last word."""

_LOOK: Final = 0.05  # seconds


class Heartbeat:
    """What a monitor shares with its threads, which must not keep it alive.

    Whoever has something to tell leaves it here as state, and wakes the talking thread: a signal handler may do so at
    any moment, and after a broken connection everything is still here to be written again.

    Args:
        client: used by the talking thread alone, once it runs.
        rank: this one.
        names: of all ranks.
        progress: what this rank does.
        times: how long what may take.
        owner: the monitor, as long as it is there.
    """

    def __init__(
        self,
        client: StoreClient,
        rank: int,
        names: list[str],
        progress: Progress,
        times: Times,
        owner: Callable[[], HealthMonitor | None],
    ) -> None:
        self.store_client = client
        self.rank = rank
        self.names = names
        self.progress = progress
        self.times = times
        self.detector = FailureDetector(rank, names, times)
        limit = times.action_timeout
        self.overdue = None if limit is None else Overdue(rank, names[rank], limit, times.look)

        self.call = Call()
        self.record: PeerFailure | None = None  # to be published by this rank
        self.said: dict[str, Any] = {}
        self.heard: dict[int, dict[str, Any]] = {}
        self.failure: PeerFailure | None = None
        self.failed = threading.Event()
        self.written = threading.Event()
        self.closing = threading.Event()
        self.answers = 0  # of the store
        self.trouble = ""  # with the store
        self.looks_often = False  # a connection was closed, and the reason is wanted
        self.hosts_store = False

        self._owner = owner
        self._first = threading.Lock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put is safe in signal handlers and finalizers
        self._host = socket.gethostname()
        self._number = 0
        self._rings = 0
        self._heard_bell: bytes | None = None
        self._told: dict[str, Any] = {}
        self._acknowledged = False
        self.threads = [
            threading.Thread(target=target, args=(self,), name=f"pipework monitor {number}", daemon=True)
            for number, target in enumerate((_talk, _guard))
        ]

    def fail(self, failure: PeerFailure) -> bool:
        """Something happened elsewhere. False if it is not the first thing that did."""
        with self._first:
            if self.failure is not None:
                return False
            self.failure = failure
        self.failed.set()
        owner = self._owner()
        if owner is not None:
            owner.tell(failure)
        return True

    def error(self) -> PipelineError:
        """What happened elsewhere, to be raised."""
        failure = self.failure
        if failure is None:
            raise RuntimeError("nothing has failed, so there is no error: look at `failure` first")
        return PipelineError(
            failure.text,
            rank=failure.rank,
            where=failure.where,
            kind=failure.kind,
            traceback_text=failure.traceback_text,
            own=failure.rank == self.rank,
        )

    def bound(self, seconds: float) -> None:
        """See `HealthMonitor.bound`."""
        if self.call.inside:
            thread = threading.Thread(
                target=_end_if_stuck, args=(self, self.call.number, seconds), name="pipework end", daemon=True
            )
            self.threads.append(thread)
            thread.start()

    def say_soon(self) -> None:
        """Wakes the talking thread."""
        self._wake.put(None)

    def sleep(self) -> None:
        """Of the talking thread: until it is time to look, or somebody has something to tell."""
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=self.times.poll)

    def publish_beat(self, *, left: bool = False, reason: str = "") -> None:
        """Shows that this rank is alive, and what it does."""
        self._number += 1
        action = status.describe_action(self.progress.action)
        beat = Beat(self._number, left, self.call, action, os.getpid(), self._host, reason)
        self.store_client.write(f"beat/{self.rank}", status.write_beat(beat))

    def publish_news(self, *, again: bool) -> None:
        """Writes what others have to know at once, if there is anything new.

        Args:
            again: a failure is written once more, in case that somebody else has written into its key.
        """
        record, said = self.record, dict(self.said)
        if self.failure is not None and not self._acknowledged:
            self.store_client.write(f"heard/{self.rank}", "1")
            self._acknowledged = True
        failed = record is not None and (again or not self.written.is_set())
        if record is not None and failed:
            self.store_client.write(f"failure/{self.rank}", status.write_failure(record))
        if said != self._told:
            self.store_client.write(f"said/{self.rank}", json.dumps(said))
        elif not failed:
            return
        self._rings += 1
        self.store_client.write("bell", f"{self.rank}:{self._rings}")
        self.store_client.look("bell")  # its answer says that the server has read all that came before
        self._told = said
        if failed:
            self.written.set()

    def hear_news(self) -> None:
        """Reads what others had to tell, if the bell says that there is anything new."""
        bell = self.store_client.look("bell")
        if bell == self._heard_bell:
            return
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        said = self.store_client.read([f"said/{rank}" for rank in others])
        failures = self.store_client.read([f"failure/{rank}" for rank in others])
        self._heard_bell = bell
        self.heard = {rank: status.read_said(raw) for rank, raw in zip(others, said, strict=True)}
        told = [status.read_failure(raw, len(self.names)) for raw in failures]
        # An exception is the cause of what else is seen at the same time, such as connections that are closed.
        for failure in sorted((each for each in told if each is not None), key=lambda each: each.kind != "error"):
            self.fail(failure)

    def see_off(self) -> None:
        """The store ends with this process: waits a moment until all others have left, or know of a failure."""
        deadline = time.monotonic() + GRACE - 0.5
        others = {rank for rank in range(len(self.names)) if rank != self.rank}
        while others and time.monotonic() < deadline:
            beats = {rank: status.read_beat(self.store_client.look(f"beat/{rank}")) for rank in others}
            gone = {rank for rank, beat in beats.items() if beat is not None and beat.left}
            others -= gone | {rank for rank in others if self.store_client.look(f"heard/{rank}") is not None}
            time.sleep(0.02)

    def judge_beats(self) -> None:
        """Looks at the others' signs of life; what is wrong with them, all others are told, too."""
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        raw = self.store_client.read([f"beat/{rank}" for rank in others])
        beats = {rank: status.read_beat(each) for rank, each in zip(others, raw, strict=True)}
        failure = self.detector.see(time.monotonic(), beats, self.call)
        if failure is not None:
            self.hear_news()  # what somebody has reported meanwhile is the cause
            self.conclude(failure)

    def conclude(self, failure: PeerFailure) -> None:
        """A failure that this rank has found out."""
        raised = self.call.inside  # now, and printed; it may have ended the call before this thread goes on
        if self.fail(failure):
            if not raised:
                _LOG.error("%s. The next call of the pipe raises this", failure.text)
            if self.record is None:
                self.record = failure
                self.say_soon()


def _talk(heartbeat: Heartbeat) -> None:
    """Everything that goes to the store and comes from it."""
    next_beat = 0.0
    broken = False
    while True:
        leaving = heartbeat.closing.is_set()
        try:
            if broken:
                heartbeat.store_client.reconnect()
                broken = False
            now = time.monotonic()
            due = now >= next_beat
            heartbeat.publish_news(again=due)
            if leaving:
                heartbeat.publish_beat(left=True, reason=_reason())
                heartbeat.store_client.look("bell")  # written, before the program ends
                if heartbeat.hosts_store:
                    heartbeat.see_off()
                return
            if due:
                heartbeat.publish_beat()
                next_beat = now + heartbeat.times.beat
            if heartbeat.failure is None:
                heartbeat.hear_news()
            if heartbeat.failure is None and (due or heartbeat.looks_often or heartbeat.detector.suspicious):
                heartbeat.judge_beats()
            heartbeat.answers += 1
        except Exception as error:  # whatever it is, the store gives no answers
            heartbeat.trouble = f" ({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''})"
            broken = True
            if leaving:
                return
            heartbeat.closing.wait(heartbeat.times.beat)
        heartbeat.sleep()


def _guard(heartbeat: Heartbeat) -> None:
    """Notices what the talking thread cannot: that it is blocked, and that this rank itself does not get on."""
    clock = Stopwatch(heartbeat.times.look)
    answers, silence = -1, 0.0
    while not heartbeat.closing.wait(heartbeat.times.poll):
        now = time.monotonic()
        elapsed = clock.look(now)
        silence = silence + elapsed if heartbeat.answers == answers else 0.0
        answers = heartbeat.answers
        if heartbeat.overdue is not None and heartbeat.failure is None:
            call = heartbeat.call
            stuck = heartbeat.overdue.look(
                now, heartbeat.progress, call, all_came=heartbeat.detector.all_came(call.number)
            )
            if stuck is not None:
                heartbeat.conclude(stuck)
        # The store may live in a rank that has left in order; who calls the others no more does not miss it.
        if silence > heartbeat.times.detect and heartbeat.call.inside:
            place = f"the store at {heartbeat.store_client.address}"
            text = f"{place} has been out of reach for {silence:.1f} s, as seen by {heartbeat.names[heartbeat.rank]}"
            heartbeat.conclude(PeerFailure(None, "lost", text + heartbeat.trouble))


def _end_if_stuck(heartbeat: Heartbeat, number: int, seconds: float) -> None:
    """Ends the process if it is still in the call of that number after so many seconds.

    Like the other threads, this one knows nothing but the heartbeat: what it were the last to hold, a process group for
    example, would be destroyed by it while the interpreter exits, and that aborts the process.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if heartbeat.closing.wait(_LOOK) or heartbeat.call.number != number or not heartbeat.call.inside:
            return
    error = heartbeat.error()
    text = f"{error}\nThis process is ended, because its present action does not come to an end:"
    end_now(text, exit_code(error))


def _reason() -> str:
    """The exception that ends the program, if it is one that nobody has handled."""
    error = getattr(sys, "last_value", None)
    return status.describe_exception(error) if isinstance(error, BaseException) else ""


def leave(heartbeat: Heartbeat, process: int) -> None:
    """Ends the threads; their last words say that this rank has left.

    Args:
        heartbeat: of the monitor that ends.
        process: which one it belongs to.
    """
    if os.getpid() != process:  # a forked child has a copy of the connection, but it is not the one that leaves
        return
    heartbeat.closing.set()
    heartbeat.say_soon()
    for thread in heartbeat.threads:
        if thread is not threading.current_thread():
            # A thread that comes back from PyTorch when the interpreter is gone aborts the process. On a busy machine
            # it may need long to say goodbye; only if it gets no answers there is no use in waiting.
            answered = -1
            while thread.is_alive() and heartbeat.store_client.answered != answered:
                answered = heartbeat.store_client.answered
                thread.join(GRACE)
