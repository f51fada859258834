"""Cuts: how many consecutive layers each stage gets, such that the slowest worker computes as little as possible.

Where each worker holds one stage, a program finds the best cut, see `best_split`.

Other placements, in which a worker holds several stages, have a local search from a few starts. It moves a layer from
one stage to another one, and the stages between them each pass a layer on.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from pipework.assignment.minimax import best_split
from pipework.schedule.analysis.memory import SLACK

Ends = list[int]
"""The layers before each stage, and all: stage s has the layers from ``ends[s]`` to ``ends[s + 1]``."""

_UNIT = 2**40  # of all layers' seconds: sums of integers do not depend on their order, as those of floats do
_FAR = 100  # stages between which a layer moves at most


@dataclass(frozen=True)
class CutProblem:
    """Consecutive layers to be cut into stages of at least one layer.

    Attributes:
        placement: the worker of each stage.
        seconds: for each stage, those of each layer there, for one micro-batch.
        memory: for each stage, the bytes of each layer there.
        limits: the bytes of each worker; infinity: no limit.
    """

    placement: tuple[int, ...]
    seconds: Sequence[Sequence[float]]
    memory: Sequence[Sequence[float]]
    limits: Sequence[float]

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.seconds[0])

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @cached_property
    def held(self) -> list[list[int]]:
        """The stages of each worker."""
        return [[s for s, at in enumerate(self.placement) if at == worker] for worker in range(len(self.limits))]

    @cached_property
    def work(self) -> list[list[int]]:
        """For each stage, the seconds of the layers before each place, in a unit of their own."""
        unit = _UNIT / (max(map(sum, self.seconds)) or 1.0)
        return _sums(self.seconds, lambda value: round(value * unit))

    @cached_property
    def sizes(self) -> list[list[int]]:
        """For each stage, the bytes of the layers before each place."""
        return _sums(self.memory, round)

    def loads(self, ends: Ends, sums: Sequence[Sequence[int]]) -> list[int]:
        """The work of each worker, or its bytes: what the sums are of."""
        return [sum(sums[s][ends[s + 1]] - sums[s][ends[s]] for s in stages) for stages in self.held]

    def key(self, ends: Ends) -> tuple[float, list[int]]:
        """What cuts are compared by, see `rank`."""
        return self.rank(self.loads(ends, self.work), self.loads(ends, self.sizes))

    def rank(self, loads: Sequence[int], sizes: Sequence[int]) -> tuple[float, list[int]]:
        """The largest share of a limit, if that is above 1; then the work of the workers, largest first."""
        return max(map(_share, sizes, self.limits)), sorted(loads, reverse=True)


def _share(size: float, limit: float) -> float:
    return size / limit if size > limit * SLACK else 1.0


def best_cut(problem: CutProblem) -> tuple[int, ...]:
    """The best cut that is found.

    The most work of a worker is as small as possible, within the limits; exactly so if each worker holds one stage.
    If no cut is within the limits, this is the one that is least above them.

    Returns:
        The number of layers of each stage.

    Example:
        >>> best_cut(CutProblem((0, 1, 1, 0), [[4, 1, 1, 1, 1]] * 4, [[0] * 5] * 4, [1, 1]))
        (1, 2, 1, 1)
    """
    return tuple(after - before for before, after in pairwise(_best(problem)))


def even_cut(problem: CutProblem) -> tuple[int, ...]:
    """The cut whose largest stage has as little work as possible, and whose others are nearly equal; without limits.

    Example:
        >>> even_cut(CutProblem((0, 1, 0, 1), [[1, 1, 1, 1, 3, 1]] * 4, [[0] * 6] * 4, [1, 1]))
        (2, 2, 1, 1)
    """
    found = best_split(problem.work, _with_stage)
    assert found is not None
    return tuple(found)


def _with_stage(loads: tuple[int, ...], load: int) -> tuple[int, ...]:
    largest, squares = loads or (0, 0)
    return max(largest, load), squares + load * load  # squares have a small sum if loads are even


def _best(problem: CutProblem) -> Ends:
    if len({*problem.placement}) < problem.stages:
        return _LocalSearch(problem, min(10_000 + 20 * problem.stages**2, 400_000)).best()

    def share(stage: int, begin: int, end: int) -> float:
        sizes = problem.sizes[stage]
        return _share(sizes[end] - sizes[begin], problem.limits[problem.placement[stage]])

    # No worker needs to have more work than in an even cut, unless memory wants that.
    most = problem.key(_even(problem, [1.0] * problem.stages))[1][0]
    for bound in (most, None):
        found = best_split(problem.work, _with_stage, share, bound)
        if found is not None:
            ends = list(accumulate(found, initial=0))
            if problem.key(ends)[0] == 1:
                break
    return ends


def _even(problem: CutProblem, shares: Sequence[float]) -> Ends:
    """Ends at which each stage has about its share of the work; a stage on a slow device gets less."""
    parts = [share / (row[-1] or 1) for share, row in zip(shares, problem.work, strict=True)]
    ends, done = [0], 0.0
    for stage, part in enumerate(parts[:-1]):
        done += part / sum(parts)
        row = problem.work[stage]
        end = bisect_left(row, done * row[-1])
        ends.append(min(max(end, ends[-1] + 1), problem.layers - (problem.stages - 1 - stage)))
    return [*ends, problem.layers]


@dataclass
class _LocalSearch:
    """Improves cuts of a problem, as long as there are steps left; a step takes about 3 microseconds."""

    problem: CutProblem
    steps: int

    def best(self) -> Ends:
        """The best cut from several starts: an even one, then random ones."""
        problem, chance = self.problem, random.Random(0)
        best = self._improved(_even(problem, [1.0] * problem.stages))
        while self.steps > 0:
            self.steps -= 10 * problem.stages
            shares = [chance.uniform(0.6, 1.6) for _ in range(problem.stages)]
            best = min(best, self._improved(_even(problem, shares)), key=problem.key)
        return best

    def _improved(self, ends: Ends) -> Ends:
        """A cut that no move improves, or the best one when there are no steps left."""
        problem = self.problem
        while True:
            loads, sizes = problem.loads(ends, problem.work), problem.loads(ends, problem.sizes)
            worst = [(_share(sizes[at], limit), loads[at], at) for at, limit in enumerate(problem.limits)]
            moves = (self._best_move(ends, at, loads, sizes) for _, _, at in sorted(worst, reverse=True))
            better = next((move for move in moves if move is not None), None)
            if better is None or self.steps < 0:
                return ends
            ends = better

    def _best_move(self, ends: Ends, worker: int, loads: Sequence[int], sizes: Sequence[int]) -> Ends | None:
        """The best move of a layer away from a worker; None if none improves the cut."""
        problem, best, found = self.problem, self.problem.rank(loads, sizes), None
        for first, last, by in self._moves(ends, worker):
            self.steps -= 1 + (last - first) // 4
            if self.steps < 0:
                break
            moved = [*ends[:first], *(end + by for end in ends[first:last]), *ends[last:]]
            new_loads, new_sizes = [*loads], [*sizes]
            for stage in range(first - 1, last):
                begin, end, old_begin, old_end = moved[stage], moved[stage + 1], ends[stage], ends[stage + 1]
                for new, sums in ((new_loads, problem.work[stage]), (new_sizes, problem.sizes[stage])):
                    new[problem.placement[stage]] += sums[end] - sums[begin] - sums[old_end] + sums[old_begin]
            rank = problem.rank(new_loads, new_sizes)
            if rank < best:
                best, found = rank, moved
        return found

    def _moves(self, ends: Ends, worker: int) -> Iterator[tuple[int, int, int]]:
        """All moves of a layer away from a worker: the first end that moves, the one after the last, and the step."""
        for stage in self.problem.held[worker]:
            if ends[stage + 1] - ends[stage] > 1:
                for other in range(max(0, stage - _FAR), min(self.problem.stages, stage + _FAR + 1)):
                    if other > stage:
                        yield stage + 1, other + 1, -1
                    elif other < stage:
                        yield other + 1, stage + 1, 1


def _sums(rows: Sequence[Sequence[float]], whole: Callable[[float], int]) -> list[list[int]]:
    """The sums before each place of each row; rows that are one object share theirs."""
    made = {id(row): row for row in rows}
    found = {key: list(accumulate(map(whole, row), initial=0)) for key, row in made.items()}
    return [found[id(row)] for row in rows]
