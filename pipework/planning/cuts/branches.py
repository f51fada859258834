"""Exact search for any placement of small problems: stage after stage, and back where no better cut can follow.

A branch ends where a worker's load reaches that of the best cut so far, its memory exceeds its limit, or the layers
still to come are too many for what is left of the workers' time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipework.planning.cuts.bisection import caps, weighted
from pipework.planning.cuts.bounds import Shares
from pipework.planning.cuts.pairs import TooManyError
from pipework.planning.cuts.tables import Places, Tables


@dataclass
class Branches:
    """An exact search.

    Attributes:
        tables: the problem.
        weights: the factor of each worker's load, in thousandths.
        steps: how many ends of stages it may look at.
    """

    tables: Tables
    weights: Sequence[int]
    steps: int
    _room: list[int] = field(default_factory=list, init=False)  # the time that each worker has left
    _free: list[int] = field(default_factory=list, init=False)  # the memory that each worker has left
    _shares: Shares = field(init=False)
    _speeds: list[float] = field(init=False)
    _best: Places | None = field(default=None, init=False)

    def better(self, high: int) -> Places | None:
        """The best of the cuts whose largest weighted load is less than this one.

        Raises:
            TooManyError: there are too many branches.
        """
        self._room = caps(high - 1, self.weights)
        self._free = list(self.tables.limits)
        self._shares = Shares(self.tables)
        self._speeds = list(map(float, self._shares.speeds))
        self._best = None
        self._try([0])
        return self._best

    def _try(self, cut: Places) -> None:
        tables, stage, start = self.tables, len(cut) - 1, cut[-1]
        stages = len(tables.sums)
        worker = tables.problem.placement[stage]
        sums, ends, memory = tables.sums[stage], tables.ends[stage], tables.memory[stage]
        last = tables.places - (stages - 1 - stage)
        for end in range(start + 1 if stage < stages - 1 else last, last + 1):
            self.steps -= 1
            if self.steps < 0:
                raise TooManyError
            size = memory[end] - memory[start]
            if sums[end] - sums[start] > self._room[worker] or size > self._free[worker]:
                break
            time = ends[end] - tables.begins[stage][start]
            self._room[worker] -= time
            self._free[worker] -= size
            if self._room[worker] >= 0 and self._enough(end):
                if end == tables.places:
                    self._keep([*cut, end])
                else:
                    self._try([*cut, end])
            self._room[worker] += time
            self._free[worker] += size

    def _enough(self, end: int) -> bool:
        """Whether what is left of the workers' time may be enough for the layers from this place on."""
        possible = sum(speed * room for speed, room in zip(self._speeds, self._room, strict=True))
        # More than any error of rounding.
        return self._shares.work[-1] - self._shares.work[end] <= possible + 1e-9 * abs(possible)

    def _keep(self, cut: Places) -> None:
        """From now on, only better cuts are looked for."""
        smaller = caps(weighted(self.tables, cut, self.weights) - 1, self.weights)
        self._best = cut
        self._room = [cap - load for cap, load in zip(smaller, self.tables.loads(cut), strict=True)]
