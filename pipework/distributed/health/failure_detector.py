"""Decides from heartbeats which other rank has failed: it is silent, left too early, or calls something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipework.distributed.health.detection_times import CappedClock
from pipework.distributed.health.process_calls import ProcessPlace
from pipework.distributed.health.status import NO_ACTION, PeerFailure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipework.distributed.health.detection_times import DetectionTimes
    from pipework.distributed.health.status import Beat, Call

_STEP: Final = "training step"
_SAME_DATA: Final = (
    "If one has run out of data before the other, give all ranks of a pipe the same batches: a DataLoader with "
    "sampler=pipe.sampler(dataset)"
)
_NOWHERE: Final = ProcessPlace()
_FOR_ALL: Final = {
    "checkpoint": "Every rank calls save_checkpoint, load_checkpoint and pipe.verify, not one of them alone. ",
    "clip_grad_norm_": "Every rank calls pipe.clip_grad_norm_, not one of them alone. ",
}


@dataclass
class _Peer:
    """The last heartbeat of another rank, the seconds since then, and the number of one in which it was elsewhere."""

    beat: Beat | None = None
    silence: float = 0.0
    crossing: int | None = None

    @property
    def left(self) -> bool:
        return self.beat is not None and self.beat.left


class FailureDetector:
    """Compares the heartbeats of the other ranks with each other and with its own clock."""

    def __init__(self, rank: int, names: Sequence[str], times: DetectionTimes) -> None:
        self._rank = rank
        self._names = names
        self._times = times
        self._clock = CappedClock(times.longest_gap)
        self._peers = {other: _Peer() for other in range(len(names)) if other != rank}

    def last_seen(self, rank: int) -> str:
        """What the last heartbeat of a lost rank reported."""
        peer = self._peers.get(rank)
        if peer is None or peer.beat is None:
            return "no heartbeat of it was received"
        beat = peer.beat
        # A heartbeat describes the moment in which it was sent; nothing is known about the time after it.
        if not beat.call.recent:
            place = f"last seen by a heartbeat from before its first call; they come every {self._times.beat:g} s"
        elif not beat.call.inside:
            place = f"last seen between calls, after {beat.call.current()}"
        elif beat.action == NO_ACTION:
            place = f"last seen at the beginning of {beat.call.current()}"
        else:
            place = f"last action: {beat.action}"
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

    def check(
        self, now: float, beats: Mapping[int, Beat | None], mine: Call, place: ProcessPlace = _NOWHERE
    ) -> PeerFailure | None:
        """Takes the heartbeats that were read, and decides.

        Args:
            now: of a clock of this process, in seconds.
            beats: of the other ranks; None: there is no valid one.
            mine: where this rank is.
            place: where it is in the calls of all its pipes.

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
        return self._find_lost() or self._find_crossing(mine, place) or self._find_mismatch(mine)

    def _find_lost(self) -> PeerFailure | None:
        """The rank that is silent for longest, if that is too long."""
        for rank, peer in sorted(self._peers.items(), key=lambda item: -item[1].silence):
            text = None
            if peer.beat is None:
                if peer.silence > self._times.join:
                    text = f"did not appear within {peer.silence:.1f} s"
            elif peer.silence > self._times.detect and not peer.left:
                text = f"lost: no heartbeat for {peer.silence:.1f} s; {self.last_seen(rank)}"
            if text is not None:
                return PeerFailure(rank, "lost", f"{self._names[rank]} {text}")
        return None

    def _find_mismatch(self, mine: Call) -> PeerFailure | None:
        """While this rank is in a call, every other rank is in it too, has been in it, or has yet to come to it."""
        if not mine.inside:
            return None
        me, what = self._names[self._rank], mine.kind(mine.number)
        for rank, peer in self._peers.items():
            if peer.beat is None:
                continue
            name, theirs = self._names[rank], peer.beat.call
            other = theirs.kind(mine.number)
            if other is not None and other != what:
                hint = "".join(_FOR_ALL.get(kind, "") for kind in (what, other) if kind)
                if _STEP in (what, other):
                    hint += _SAME_DATA
                return PeerFailure(
                    rank,
                    "disagreement",
                    f"call {mine.number} is {other!r} on {name}, and {what!r} on {me}: every rank must make the same "
                    f"calls in the same order. {name} has made {theirs.total()}, {me} {mine.total()}"
                    + (f". {hint.strip()}" if hint else ""),
                )
            reason = f" with {peer.beat.reason}" if peer.beat.reason else ""
            if peer.left and theirs.number < mine.number:
                also = f" ({mine.total()})" if len(mine.counts) > 1 else ""
                text = f"{name} left after {theirs.total()}{reason}, and {me} is in {mine.current()}{also}"
                if what == _STEP and not reason:
                    text += f". {_SAME_DATA}"
                return PeerFailure(rank, "left", text)
            if peer.left and theirs.inside and theirs.number == mine.number:
                text = f"{name} left in the middle of {theirs.current()}{reason}, and {me} is still in it"
                return PeerFailure(rank, "left", text)
        return None

    def _find_crossing(self, mine: Call, place: ProcessPlace) -> PeerFailure | None:
        """While this rank is in a call of this pipe, another one waits for it in a call of another pipe.

        That rank finds the same, and whoever is the first leaves; then its last heartbeat is enough for the other.
        """
        for rank, peer in self._peers.items():
            if not mine.inside or peer.beat is None or not place.crosses(peer.beat.place):
                peer.crossing = None
            elif peer.left or peer.crossing not in (None, peer.beat.number):
                return self._crossing(rank, place, peer.beat.place)
            else:
                peer.crossing = peer.beat.number
        return None

    def _crossing(self, rank: int, place: ProcessPlace, there: ProcessPlace) -> PeerFailure:
        me, name = self._names[self._rank], self._names[rank]
        return PeerFailure(
            rank,
            "disagreement",
            f"{me} waits in call {place.begun[place.pipe]} of pipe {place.pipe}, and {name} in call "
            f"{there.begun[there.pipe]} of pipe {there.pipe}, which {me} has not begun (pipes are numbered in the "
            "order in which they were made): call all pipes in the same order on all ranks",
        )
