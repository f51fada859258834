"""Who is lost, who left too early, who does something else: one rank's judgement of the others' signs of life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipework.distributed.health.status import NO_ACTION, PeerFailure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipework.distributed.health.status import Beat, Call

_STEP: Final = "training step"
_SAME_DATA: Final = (
    "If one has run out of data before the other, give every rank the same number of batches: drop_last=True, or a "
    "DistributedSampler"
)
_FOR_ALL: Final = {
    "checkpoint": "Every rank calls save_checkpoint and load_checkpoint, not one of them alone. ",
    "clip_grad_norm_": "Every rank calls pipe.clip_grad_norm_, not one of them alone. ",
}


@dataclass(frozen=True)
class Times:
    """How long what may take, in seconds.

    Attributes:
        beat: between signs of life.
        detect: of silence, after which a rank or the store is lost.
        poll: between looks for news.
        join: for a rank's first sign of life.
        action_timeout: for one action; None: for ever.

    Raises:
        ValueError: they make no sense.
    """

    beat: float
    detect: float
    poll: float
    join: float
    action_timeout: float | None

    def __post_init__(self) -> None:
        if not (0 < self.poll <= self.beat and 4 * self.beat <= self.detect):
            raise ValueError(
                "a monitor needs poll <= beat and detect >= 4 x beat, so that a single late sign of life is no "
                "failure: "
                f"got poll={self.poll}, beat={self.beat}, detect={self.detect} (seconds)"
            )
        for name, value in (("join", self.join), ("action_timeout", self.action_timeout)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {value}")

    @property
    def look(self) -> float:
        """What counts at most of the time between two looks: more than that, and the process itself was not well."""
        return 2 * self.beat


class Stopwatch:
    """Adds up the time between looks, but never more for one of them than a bound.

    A process that was itself stopped, whose machine slept, or whose interpreter was busy for long, has not watched the
    others meanwhile, and must not hold that time against them.

    Args:
        longest: seconds that count at most between two looks.

    Example:
        >>> monitor = Stopwatch(longest=1.0)
        >>> monitor.look(10.0), monitor.look(10.5), monitor.look(99.0)
        (0.0, 0.5, 1.0)
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._last: float | None = None

    def look(self, now: float) -> float:
        """The seconds since the last look that count."""
        last, self._last = self._last, now
        return 0.0 if last is None else min(now - last, self._longest)


@dataclass
class _Seen:
    """What is known of another rank."""

    beat: Beat | None = None
    silence: float = 0.0


class FailureDetector:
    """Looks at the beats of the other ranks, by its own clock only.

    Args:
        rank: who judges.
        names: of all ranks, for messages.
        times: how long what may take.
    """

    def __init__(self, rank: int, names: Sequence[str], times: Times) -> None:
        self._rank = rank
        self._names = names
        self._times = times
        self._clock = Stopwatch(times.look)
        self._others = {other: _Seen() for other in range(len(names)) if other != rank}

    def last(self, rank: int) -> Beat | None:
        """The last sign of life of another rank."""
        return self._others[rank].beat if rank in self._others else None

    def last_words(self, rank: int) -> str:
        """What is known of a rank that is gone."""
        seen = self._others.get(rank)
        if seen is None or seen.beat is None:
            return "no sign of life was seen of it"
        beat = seen.beat
        # A sign of life tells of its own moment; what came after it, nobody knows.
        if not beat.call.inside:
            place = f"last seen {beat.call.before()}"
        elif beat.action == NO_ACTION:
            place = f"last seen at the beginning of {beat.call.current()}"
        else:
            place = f"last action: {beat.action}"
        return f"{place} (pid {beat.pid} on {beat.host})"

    def silent(self, seconds: float) -> int | None:
        """The rank that has shown no sign of life for longest, if that is so long."""
        rank, seen = max(self._others.items(), key=lambda item: item[1].silence, default=(None, _Seen()))
        return rank if seen.silence > seconds and not (seen.beat is not None and seen.beat.left) else None

    def all_came(self, number: int) -> bool:
        """Whether all others have begun the call of that number."""
        return all(seen.beat is not None and seen.beat.call.number >= number for seen in self._others.values())

    @property
    def suspicious(self) -> bool:
        """Whether somebody is silent for longer than usual, or not there yet: it is worth looking more often."""
        return any(seen.beat is None or seen.silence > 1.5 * self._times.beat for seen in self._others.values())

    @property
    def has_seen_all(self) -> bool:
        """Whether all others have shown a sign of life."""
        return all(seen.beat is not None for seen in self._others.values())

    def see(self, now: float, beats: Mapping[int, Beat | None], mine: Call) -> PeerFailure | None:
        """Takes notice of what was read.

        Args:
            now: of a clock of one's own, in seconds.
            beats: of the other ranks; None: there is none, or no valid one.
            mine: where this rank is.

        Returns:
            What is wrong, if anything is.
        """
        elapsed = self._clock.look(now)
        for rank, seen in self._others.items():
            beat = beats.get(rank)
            if beat is None or (seen.beat is not None and beat.number == seen.beat.number):
                seen.silence += elapsed
            else:
                seen.beat = beat
                seen.silence = 0.0
        return self._lost() or self._astray(mine)

    def _lost(self) -> PeerFailure | None:
        for rank, seen in sorted(self._others.items(), key=lambda item: -item[1].silence):
            name, beat = self._names[rank], seen.beat
            if beat is None:
                if seen.silence > self._times.join:
                    return PeerFailure(rank, "lost", f"{name} did not appear within {seen.silence:.1f} s")
            elif seen.silence > self._times.detect and not beat.left:
                return PeerFailure(
                    rank,
                    "lost",
                    f"{name} lost: no sign of life for {seen.silence:.1f} s; {self.last_words(rank)}",
                )
        return None

    def _astray(self, mine: Call) -> PeerFailure | None:
        """While this rank is inside a call, the others must be in it, too, or have been, or still come."""
        if not mine.inside:
            return None
        me, what = self._names[self._rank], mine.kind(mine.number)
        for rank, seen in self._others.items():
            if seen.beat is None:
                continue
            name, theirs, left = self._names[rank], seen.beat.call, seen.beat.left
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
            reason = f" with {seen.beat.reason}" if seen.beat.reason else ""
            if left and theirs.number < mine.number:
                also = f" ({mine.total()})" if len(mine.counts) > 1 else ""
                text = f"{name} left after {theirs.total()}{reason}, and {me} is in {mine.current()}{also}"
                if what == _STEP and not reason:
                    text += f". {_SAME_DATA}"
                return PeerFailure(rank, "left", text)
            if left and theirs.inside and theirs.number == mine.number:
                text = f"{name} left in the middle of {theirs.current()}{reason}, and {me} is still in it"
                return PeerFailure(rank, "left", text)
        return None
