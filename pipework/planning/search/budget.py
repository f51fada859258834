"""How long a search for a plan may take: some seconds, or a number of simulated candidates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from pipework.schedule.argument_checks import positive_integers

_Result = TypeVar("_Result")

# What is done with the best candidate after the search takes about as long as so many candidates. It is kept free, but
# for no more than this part of all seconds: with few of them the search is what they are for.
_AFTER, _MOST_KEPT = 4, 0.25


@dataclass
class SearchBudget:
    """When to stop: after some seconds, or after a number of simulated candidates, which is the same in every run.

    Attributes:
        seconds: of the clock; infinity: no limit.
        iterations: candidates; infinity: no limit.
        used: candidates so far.
    """

    seconds: float = inf
    iterations: float = inf
    used: int = 0
    _start: float = field(default_factory=time.perf_counter)
    _busy: float = 0.0

    def spend(self, simulate: Callable[[], _Result]) -> _Result:
        """The result of one candidate more."""
        begin = time.perf_counter()
        result = simulate()
        self._busy += time.perf_counter() - begin
        self.used += 1
        return result

    def share(self) -> float:
        """How much is used, from 0 to 1 and more."""
        after = min(_AFTER * self._each, _MOST_KEPT * self.seconds)
        elapsed = time.perf_counter() - self._start
        return max((elapsed + after) / self.seconds, self.used / self.iterations)

    def part(self, share: float) -> SearchBudget:
        """A budget of a share of this one, which begins now."""
        return SearchBudget(share * self.seconds, max(1.0, share * self.iterations))

    @property
    def _each(self) -> float:
        return self._busy / self.used if self.used else 0.0


def checked_budget(seconds: float | None, iterations: int | None) -> SearchBudget:
    """The budget of a search; iterations count, if they are given.

    Raises:
        TypeError: the number of iterations is no integer.
        ValueError: a number is not above 0, or there is none.
    """
    if iterations is not None:
        positive_integers(iterations=iterations)
        return SearchBudget(iterations=iterations)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < inf:
        raise ValueError(
            f"seconds is {seconds!r}: wanted a number above 0 and not infinite, or iterations= in its place"
        )
    return SearchBudget(seconds)
