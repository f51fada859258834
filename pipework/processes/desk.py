"""How a watch sees and is seen: its threads, and what it shares with them.

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

from pipework.processes import records
from pipework.processes.errors import PipelineError, exit_code
from pipework.processes.exiting import end_now
from pipework.processes.judge import Judge, Stopwatch, Times
from pipework.processes.progress import Overdue
from pipework.processes.records import Beat, Call, PeerFailure

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.processes.line import Line
    from pipework.processes.progress import Progress
    from pipework.processes.watch import Watch

_LOG = logging.getLogger("pipework")

GRACE: Final = 2.0
"""Seconds that a program waits at most for the store to take a last word."""

_LOOK: Final = 0.05  # seconds


class Desk:
    """What a watch shares with its threads, which must not keep it alive.

    Whoever has something to tell leaves it here as state, and wakes the talking thread: a signal handler may do so at
    any moment, and after a broken connection everything is still here to be written again.

    Args:
        line: used by the talking thread alone, once it runs.
        rank: this one.
        names: of all ranks.
        progress: what this rank does.
        times: how long what may take.
        owner: the watch, as long as it is there.
    """

    def __init__(
        self,
        line: Line,
        rank: int,
        names: list[str],
        progress: Progress,
        times: Times,
        owner: Callable[[], Watch | None],
    ) -> None:
        self.line = line
        self.rank = rank
        self.names = names
        self.progress = progress
        self.times = times
        self.judge = Judge(rank, names, times)
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
            threading.Thread(target=target, args=(self,), name=f"pipework watch {number}", daemon=True)
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
        """See `Watch.bound`."""
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
        action = records.describe_action(self.progress.action)
        beat = Beat(self._number, left, self.call, action, os.getpid(), self._host, reason)
        self.line.write(f"beat/{self.rank}", records.write_beat(beat))

    def publish_news(self, *, again: bool) -> None:
        """Writes what others have to know at once, if there is anything new.

        Args:
            again: a failure is written once more, in case that somebody else has written into its key.
        """
        record, said = self.record, dict(self.said)
        if self.failure is not None and not self._acknowledged:
            self.line.write(f"heard/{self.rank}", "1")
            self._acknowledged = True
        failed = record is not None and (again or not self.written.is_set())
        if record is not None and failed:
            self.line.write(f"failure/{self.rank}", records.write_failure(record))
        if said != self._told:
            self.line.write(f"said/{self.rank}", json.dumps(said))
        elif not failed:
            return
        self._rings += 1
        self.line.write("bell", f"{self.rank}:{self._rings}")
        self.line.look("bell")  # its answer says that the server has read all that came before
        self._told = said
        if failed:
            self.written.set()

    def hear_news(self) -> None:
        """Reads what others had to tell, if the bell says that there is anything new."""
        bell = self.line.look("bell")
        if bell == self._heard_bell:
            return
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        said = self.line.read([f"said/{rank}" for rank in others])
        failures = self.line.read([f"failure/{rank}" for rank in others])
        self._heard_bell = bell
        self.heard = {rank: records.read_said(raw) for rank, raw in zip(others, said, strict=True)}
        told = [records.read_failure(raw, len(self.names)) for raw in failures]
        # An exception is the cause of what else is seen at the same time, such as connections that are closed.
        for failure in sorted((each for each in told if each is not None), key=lambda each: each.kind != "error"):
            self.fail(failure)

    def see_off(self) -> None:
        """The store ends with this process: waits a moment until all others have left, or know of a failure."""
        deadline = time.monotonic() + GRACE - 0.5
        others = {rank for rank in range(len(self.names)) if rank != self.rank}
        while others and time.monotonic() < deadline:
            beats = {rank: records.read_beat(self.line.look(f"beat/{rank}")) for rank in others}
            gone = {rank for rank, beat in beats.items() if beat is not None and beat.left}
            others -= gone | {rank for rank in others if self.line.look(f"heard/{rank}") is not None}
            time.sleep(0.02)

    def judge_beats(self) -> None:
        """Looks at the others' signs of life; what is wrong with them, all others are told, too."""
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        raw = self.line.read([f"beat/{rank}" for rank in others])
        beats = {rank: records.read_beat(each) for rank, each in zip(others, raw, strict=True)}
        failure = self.judge.see(time.monotonic(), beats, self.call)
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


def _talk(desk: Desk) -> None:
    """Everything that goes to the store and comes from it."""
    next_beat = 0.0
    broken = False
    while True:
        leaving = desk.closing.is_set()
        try:
            if broken:
                desk.line.reconnect()
                broken = False
            now = time.monotonic()
            due = now >= next_beat
            desk.publish_news(again=due)
            if leaving:
                desk.publish_beat(left=True, reason=_reason())
                desk.line.look("bell")  # written, before the program ends
                if desk.hosts_store:
                    desk.see_off()
                return
            if due:
                desk.publish_beat()
                next_beat = now + desk.times.beat
            if desk.failure is None:
                desk.hear_news()
            if desk.failure is None and (due or desk.looks_often or desk.judge.suspicious):
                desk.judge_beats()
            desk.answers += 1
        except Exception as error:  # whatever it is, the store gives no answers
            desk.trouble = f" ({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''})"
            broken = True
            if leaving:
                return
            desk.closing.wait(desk.times.beat)
        desk.sleep()


def _guard(desk: Desk) -> None:
    """Notices what the talking thread cannot: that it is blocked, and that this rank itself does not get on."""
    clock = Stopwatch(desk.times.look)
    answers, silence = -1, 0.0
    while not desk.closing.wait(desk.times.poll):
        now = time.monotonic()
        elapsed = clock.look(now)
        silence = silence + elapsed if desk.answers == answers else 0.0
        answers = desk.answers
        if desk.overdue is not None and desk.failure is None:
            call = desk.call
            stuck = desk.overdue.look(now, desk.progress, call, all_came=desk.judge.all_came(call.number))
            if stuck is not None:
                desk.conclude(stuck)
        # The store may live in a rank that has left in order; who calls the others no more does not miss it.
        if silence > desk.times.detect and desk.call.inside:
            place = f"the store at {desk.line.address}"
            text = f"{place} has been out of reach for {silence:.1f} s, as seen by {desk.names[desk.rank]}"
            desk.conclude(PeerFailure(None, "lost", text + desk.trouble))


def _end_if_stuck(desk: Desk, number: int, seconds: float) -> None:
    """Ends the process if it is still in the call of that number after so many seconds.

    Like the other threads, this one knows nothing but the desk: what it were the last to hold, a process group for
    example, would be destroyed by it while the interpreter exits, and that aborts the process.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if desk.closing.wait(_LOOK) or desk.call.number != number or not desk.call.inside:
            return
    error = desk.error()
    text = f"{error}\nThis process is ended, because its present action does not come to an end:"
    end_now(text, exit_code(error))


def _reason() -> str:
    """The exception that ends the program, if it is one that nobody has handled."""
    error = getattr(sys, "last_value", None)
    return records.describe_exception(error) if isinstance(error, BaseException) else ""


def leave(desk: Desk, process: int) -> None:
    """Ends the threads; their last words say that this rank has left.

    Args:
        desk: of the watch that ends.
        process: which one it belongs to.
    """
    if os.getpid() != process:  # a forked child has a copy of the connection, but it is not the one that leaves
        return
    desk.closing.set()
    desk.say_soon()
    for thread in desk.threads:
        if thread is not threading.current_thread():
            # A thread that comes back from PyTorch when the interpreter is gone aborts the process. On a busy machine
            # it may need long to say goodbye; only if it gets no answers there is no use in waiting.
            answered = -1
            while thread.is_alive() and desk.line.answered != answered:
                answered = desk.line.answered
                thread.join(GRACE)
