"""The best plan so far, and how much longer a search may go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from pipework_synthesis.greedy import Keys, Policy, greedy_orders
from pipework_synthesis.problem import Orders
from pipework_synthesis.solving import SolverEffort
from pipework_synthesis.times import TimedOrders, Times

Progress = Callable[[str], None]

_UNITS: Final = 0.1
"""The solver's deterministic units in a second, roughly."""
_ROUNDING: Final = 1e-9


@dataclass
class Budget:
    """Seconds, or a number of steps; with steps the clock is never looked at, so that results are the same each time.

    Attributes:
        seconds: how long the search may take; None: no limit of time.
        iterations: how many steps it may take; None: no limit of steps.
        begun: when it began.
        steps: how many steps were taken.
    """

    seconds: float | None
    iterations: int | None
    begun: float = field(default_factory=time.monotonic)
    steps: int = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self.begun

    @property
    def left(self) -> float:
        """The share of the budget that is left, from 1 to 0."""
        shares = []
        if self.iterations is not None:
            shares.append(1.0 - self.steps / self.iterations if self.iterations else 0.0)
        if self.seconds is not None:
            shares.append(1.0 - self.elapsed / self.seconds if self.seconds else 0.0)
        return max(0.0, min(shares, default=0.0))

    def part(self, share: float) -> Budget:
        """A budget of a share of what is left, for a part of the search."""
        seconds = None if self.seconds is None else max(0.0, self.seconds - self.elapsed) * share
        iterations = None if self.iterations is None else round((self.iterations - self.steps) * share)
        return Budget(seconds, iterations)

    def effort(self, seconds: float, seed: int = 0) -> SolverEffort:
        """What a call of the solver may take: so long, at most what is left."""
        if self.seconds is None:
            return SolverEffort(seconds * _UNITS, True, seed)
        left = max(0.01, self.seconds - self.elapsed)
        return SolverEffort(min(seconds, left), False, seed)


class Incumbent:
    """The best plan for one problem in integers, and where it came from.

    Attributes:
        times: of the problem.
        plan: the best plan; None before the first.
        origin: what found the plan that it began from.
        improved_by: what improved it last.
        bound: no plan is shorter.
    """

    def __init__(self, times: Times, bound: float, unit: float, progress: Progress | None) -> None:
        self.times, self.bound, self._unit, self._progress = times, bound, unit, progress
        self.plan: TimedOrders | None = None
        self.origin = self.improved_by = ""

    @property
    def makespan(self) -> float:
        """Of the best plan; infinity if there is none."""
        return inf if self.plan is None else self.plan.makespan

    @property
    def closed(self) -> bool:
        """Whether no plan can be shorter, by more than sums of the same times in another order differ."""
        return self.makespan <= self.bound * (1 + _ROUNDING)

    @property
    def found_by(self) -> str:
        """How the plan was found, in words."""
        return f"{self.origin}, then {self.improved_by}" if self.improved_by else self.origin

    def offer(self, orders: Orders, method: str, *, improves: bool = False) -> bool:
        """Takes orders that are shorter than the best, if they fit; returns whether it did."""
        plan = self.times.plan(orders)
        if plan is None or plan.makespan >= self.makespan or not self.times.fits(orders):
            return False
        self.take(plan, method, improves=improves)
        return True

    def take(self, plan: TimedOrders, method: str, *, improves: bool = False) -> None:
        """Takes a plan that fits, and tells of it if it is shorter."""
        shorter = plan.makespan < self.makespan
        self.plan = plan
        if not shorter:
            return
        if improves:
            self.improved_by = method
        else:
            self.origin, self.improved_by = method, ""
        if self._progress is not None:
            self._progress(f"{plan.makespan * self._unit:.6g} by {method}")

    def try_keys(self, keys: Keys, policy: Policy, method: str, *, improves: bool = False) -> float:
        """Makes a list schedule and takes it if it is shorter; returns its time, infinity if there is none."""
        made = greedy_orders(self.times.problem, keys, policy)
        if made is None:
            return inf
        if made[0] < self.makespan:
            self.offer(made[1], method, improves=improves)
        return made[0]
