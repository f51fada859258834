"""Which rank has failed: another one, as its heartbeats show, or this one, if an action of it takes too long."""

from __future__ import annotations

import math
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pipework.distributed.health.status import NO_CALL, PeerFailure, describe_action

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

    from pipework.distributed.health.status import Beat, Call, PipeCall

_STEP: Final = "training step"
_SAME_DATA: Final = (
    "If one has run out of data before the other, give all ranks of a pipe the same batches: a DataLoader with "
    "sampler=pipe.sampler(dataset)"
)
_COLLECTIVES: Final = (os.path.join("torch", "distributed", ""), os.path.join("pipework", "fsdp_private.py"))


@dataclass(frozen=True)
class DetectionTimes:
    """Times of failure detection, in seconds.

    Attributes:
        beat: between heartbeats.
        detect: without a heartbeat, after which a rank is lost; without an answer, after which the store is.
        poll: between two reads of what other ranks report.
        action_timeout: that a single action of a collective call may take; None: no limit. Waiting for another rank may
            take twice as long.
    """

    beat: float = 0.5
    detect: float = 10.0
    poll: float = 0.1
    action_timeout: float | None = None

    @property
    def longest_gap(self) -> float:
        """The most that counts of the time between two checks: if it was longer, this process itself did not run."""
        return 2 * self.beat


class CappedClock:
    """Measures the time between two checks, and counts no more than a bound of it.

    A process that was stopped, whose machine slept, or whose interpreter was blocked, has not received heartbeats
    meanwhile. It must not count that time as silence of the others.

    Args:
        longest: seconds that count at most between two checks.

    Example:
        >>> clock = CappedClock(longest=1.0)
        >>> clock.elapsed(10.0), clock.elapsed(10.5), clock.elapsed(99.0)
        (0.0, 0.5, 1.0)
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._last: float | None = None

    def elapsed(self, now: float) -> float:
        """The seconds since the last call, up to the bound."""
        last, self._last = self._last, now
        return 0.0 if last is None else min(now - last, self._longest)


class Progress:
    """Plain attributes: setting two of them for each action costs some tens of nanoseconds.

    Attributes:
        action: what runs now, any object; it becomes text only when a heartbeat or a message needs it.
        count: another number for every action.
        waiting: whether the rank waits for another one, rather than computing.

    Example:
        >>> progress = Progress()
        >>> progress.action = "optimizer"
        >>> progress.count += 1
        >>> with progress.waits():
        ...     progress.waiting
        True
    """

    __slots__ = ("action", "count", "waiting")

    def __init__(self) -> None:
        self.action: object = None
        self.count = 0
        self.waiting = False

    def waits(self) -> Progress:
        """A context in which the rank waits for other ranks."""
        return self

    def __enter__(self) -> None:
        self.waiting = True

    def __exit__(self, *_: object) -> None:
        self.waiting = False


class ProcessCalls:
    """Counts the calls that a process makes of the pipes of one `DeviceMesh`, one after the other.

    So ranks that call two pipes in another order find out why they wait. All ranks make these pipes in the same order,
    so each can number them by itself.

    Attributes:
        present: the call in which the process is.
        running: held during a call. Layers of two pipes may call collectives of the same groups, which must not be
            mixed up.

    Example:
        >>> calls = ProcessCalls()
        >>> calls.add(), calls.add()
        (1, 2)
        >>> calls.begin(2)
        >>> calls.waits_for((1, 1)), calls.waits_for((2, 1))
        ((2, 1), (0, 0))
        >>> calls.end()
        >>> calls.present
        (0, 0)
    """

    def __init__(self) -> None:
        self.present = NO_CALL
        self.running = threading.Lock()
        self._begun: dict[int, float] = {}  # of each pipe, how many calls; infinitely many once it has failed here
        self._failed: dict[int, PipeCall] = {}  # by each pipe that was not called since

    def __reduce__(self) -> tuple[Any, ...]:
        """It hangs on the mesh, of which a copy is of another process."""
        return ProcessCalls, ()

    def add(self) -> int:
        """A pipe is made; returns its number."""
        number = len(self._begun) + 1
        self._begun[number] = 0
        return number

    def begin(self, pipe: int) -> None:
        """A call of that pipe begins."""
        number = int(self._begun[pipe]) + 1
        self._begun[pipe] = number
        self._failed.pop(pipe, None)
        self.present = pipe, number

    def refuse(self, pipe: int) -> None:
        """A call of that pipe is refused, as the pipe has failed before."""
        self._begun[pipe] = math.inf
        self._failed.pop(pipe, None)

    def end(self, *, failed: bool = False) -> None:
        """The present call has ended.

        If it has failed, processes that wait in other pipes are to see that this one was there, even if they look
        later: the program may go on and never call these pipes.
        """
        if failed:
            self._failed = {pipe: self.present for pipe in self._begun if pipe != self.present[0]}
            self._begun[self.present[0]] = math.inf
        self.present = NO_CALL

    def place(self, pipe: int) -> PipeCall:
        """What heartbeats of that pipe say: in which call the process is, or has failed before it called this pipe."""
        return self._failed.get(pipe, self.present)

    def waits_for(self, theirs: PipeCall) -> PipeCall:
        """The present call, if another process is in one of another pipe, which this one has yet to begin after it."""
        (pipe, number), mine = theirs, self.present  # which the program may change meanwhile
        return mine if self._begun.get(pipe, number) < number and pipe != mine[0] else NO_CALL


@dataclass
class _Peer:
    """The last heartbeat of another rank, and the seconds since then."""

    beat: Beat | None = None
    silence: float = 0.0

    @property
    def left(self) -> bool:
        return self.beat is not None and self.beat.left


class FailureDetector:
    """Compares the heartbeats of the other ranks with the calls of this one and with its clock.

    Args:
        rank: this one.
        names: of all ranks.
        times: see the class.
        calls: of all pipes of this process.
    """

    def __init__(self, rank: int, names: Mapping[int, str], times: DetectionTimes, calls: ProcessCalls) -> None:
        self._rank = rank
        self._names = names
        self._times = times
        self._calls = calls
        self._clock = CappedClock(times.longest_gap)
        self._peers = {other: _Peer() for other in names if other != rank}

    def last_seen(self, rank: int) -> str:
        """What the last heartbeat of a lost rank reported."""
        peer = self._peers.get(rank)
        if peer is None or peer.beat is None:
            return "no heartbeat of it was received"
        beat = peer.beat
        # A heartbeat describes the moment in which it was sent; nothing is known about the time after it.
        inside = f"last action: {beat.action}, in" if beat.call.inside else "last seen after"
        place = f"{inside} {beat.call.text()}"
        return f"{place} (pid {beat.pid} on {beat.host})"

    def most_silent(self, seconds: float) -> int | None:
        """The rank whose last heartbeat is the oldest, if it is older than so many seconds."""
        rank, peer = max(self._peers.items(), key=lambda item: item[1].silence, default=(None, _Peer()))
        return rank if peer.silence > seconds and not peer.left else None

    def all_entered(self, number: int) -> bool:
        """Whether all other ranks have begun the call of that number."""
        return all(peer.beat is not None and peer.beat.call.number >= number for peer in self._peers.values())

    @property
    def any_late(self) -> bool:
        """Whether a heartbeat is late or has never come, so that the next check should come soon."""
        return any(peer.beat is None or peer.silence > 1.5 * self._times.beat for peer in self._peers.values())

    @property
    def has_seen_all(self) -> bool:
        """Whether a heartbeat of every other rank was received."""
        return all(peer.beat is not None for peer in self._peers.values())

    def announced(self, subject: str) -> dict[int, Any]:
        """What the other ranks say about a subject, see `HealthMonitor.announce`."""
        every = {rank: peer.beat.messages for rank, peer in self._peers.items() if peer.beat is not None}
        return {rank: messages[subject] for rank, messages in every.items() if subject in messages}

    def check(self, now: float, beats: Mapping[int, Beat | None], mine: Call) -> PeerFailure | None:
        """Takes the heartbeats that were read, and decides.

        Args:
            now: of a clock of this process, in seconds.
            beats: of the other ranks; None: there is no valid one.
            mine: where this rank is.

        Returns:
            The failure of a rank; None: there is none.
        """
        elapsed = self._clock.elapsed(now)
        for rank, peer in self._peers.items():
            beat = beats.get(rank)
            if beat is None or (peer.beat is not None and beat.number == peer.beat.number):
                peer.silence += elapsed
            else:
                peer.beat, peer.silence = beat, 0.0
        return self._find_lost() or self._find_mismatch(mine)

    def _find_lost(self) -> PeerFailure | None:
        """A rank whose last heartbeat is too old; of several, the one with the oldest."""
        for rank, peer in sorted(self._peers.items(), key=lambda item: -item[1].silence):
            if peer.beat is not None and peer.silence > self._times.detect and not peer.left:
                text = f"{self._names[rank]} lost: no heartbeat for {peer.silence:.1f} s; {self.last_seen(rank)}"
                return PeerFailure(rank, "lost", text)
        return None

    def _find_mismatch(self, mine: Call) -> PeerFailure | None:
        """While this rank is in a call, every other rank is in it too, has been in it, or has yet to come to it."""
        me, what = self._names[self._rank], mine.kind(mine.number)
        for rank, peer in self._peers.items():
            beat = peer.beat
            if beat is None or not mine.inside:
                continue
            name, theirs = self._names[rank], beat.call
            other = theirs.kind(mine.number)
            if theirs.number < mine.number and (present := self._calls.waits_for(beat.place)) != NO_CALL:
                (here, my_call), (there, their_call) = present, beat.place
                return PeerFailure(
                    rank,
                    "disagreement",
                    f"{me} waits in call {my_call} of pipe {here}, and {name} in call {their_call} of pipe {there}, "
                    f"which {me} has not begun (pipes are numbered in the order in which they were made): call all "
                    "pipes in the same order on all ranks",
                )
            broke_off = beat.left and (theirs.inside or beat.reason)
            hint = f". {_SAME_DATA}" if _STEP in (what, other) and not broke_off else ""
            if other not in (None, what):
                text = f"call {mine.number} is {other!r} on {name}, and {what!r} on {me}: every rank must make the same"
                return PeerFailure(rank, "disagreement", f"{text} calls in the same order{hint}")
            if beat.left and (theirs.number, not theirs.inside) < (mine.number, True):
                place = "in the middle of" if theirs.inside else "after"
                reason = f" with {beat.reason}" if beat.reason else ""
                text = f"{name} left {place} {theirs.text()}{reason}, and {me} is in {mine.text()}{hint}"
                return PeerFailure(rank, "left", text)
        return None


class StuckDetector:
    """Measures how long the present action of this rank has taken.

    A rank that waits for another one has twice the time, so that the rank that all others wait for is found first; also
    one that waits in a collective of its layers, as its stacks show. The time starts again when the wait is over. While
    some rank has not entered the call, for example because it still loads data, no rank that waits is stuck.
    """

    def __init__(self, rank: int, name: str, times: DetectionTimes) -> None:
        assert times.action_timeout is not None
        self._rank = rank
        self._name = name
        self._limit = times.action_timeout
        self._clock = CappedClock(times.longest_gap)
        self._current = (-1, -1, False)
        self._seconds = 0.0

    def check(self, now: float, progress: Progress, call: Call, *, all_entered: bool = True) -> PeerFailure | None:
        """Returns the failure if the rank is stuck.

        Args:
            now: of a clock of this process, in seconds.
            progress: what the rank does.
            call: where it is.
            all_entered: whether all other ranks have begun this call, too.
        """
        elapsed = self._clock.elapsed(now)
        current = (call.number, progress.count, progress.waiting)
        if not call.inside or current != self._current or (progress.waiting and not all_entered):
            self._current, self._seconds = current, 0.0
            return None
        self._seconds += elapsed
        waiting = current[-1]  # the program may have changed progress meanwhile
        if self._seconds > self._limit and not waiting:
            waiting = is_in_collective()
        if self._seconds <= self._limit * (1 + waiting):
            return None
        doing = "has waited" if waiting else "has been busy"
        action = describe_action(progress.action)
        text = f"{self._name} is stuck: it {doing} for {self._seconds:.1f} s with one action, {action}"
        return PeerFailure(self._rank, "stuck", text, action, "".join(_stacks()))


def is_in_collective() -> bool:
    """Whether a thread of this process is in code that communicates for layers."""
    for frame in sys._current_frames().values():
        each: FrameType | None = frame
        while each is not None:
            if any(part in each.f_code.co_filename for part in _COLLECTIVES):
                return True
            each = each.f_back
    return False


def _stacks() -> Iterator[str]:
    """The stack of each thread of this process, except those of the monitor."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if not name.startswith("pipework monitor"):
            yield f"thread {name!r}:\n"
            yield from traceback.format_stack(frame, limit=20)
