"""The times of failure detection, and a clock that does not count the time in which this process itself did not run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DetectionTimes:
    """How long each step of failure detection takes at most, in seconds; see the arguments of `HealthMonitor`.

    Raises:
        ValueError: the times contradict each other.
    """

    beat: float
    detect: float
    poll: float
    join: float
    action_timeout: float | None

    def __post_init__(self) -> None:
        if not (0 < self.poll <= self.beat and 4 * self.beat <= self.detect):
            raise ValueError(
                "a monitor needs poll <= beat and detect >= 4 x beat, so that one late heartbeat is no failure: "
                f"got poll={self.poll}, beat={self.beat}, detect={self.detect} (seconds)"
            )
        for name, value in (("join", self.join), ("action_timeout", self.action_timeout)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {value}")

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
