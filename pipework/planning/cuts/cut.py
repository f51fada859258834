"""A cut: where a model is cut, and what that means for each worker."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from pipework.planning.cuts.problem import CutProblem


@dataclass(frozen=True)
class Cut:
    """A balance, with the load and the memory of each worker.

    Attributes:
        balance: the number of layers of each stage.
        loads: for each worker, the seconds that it computes for a micro-batch.
        memory: for each worker, the bytes of its layers.
        problem: what was cut.
    """

    balance: tuple[int, ...]
    loads: tuple[float, ...]
    memory: tuple[float, ...]
    problem: CutProblem = field(repr=False, compare=False)

    @property
    def bottleneck(self) -> float:
        """The load of the slowest worker."""
        return max(self.loads)


def cut_at(problem: CutProblem, balance: Sequence[int]) -> Cut:
    """The cut with a given number of layers of each stage. Whether it respects the limits is not looked at.

    Raises:
        ValueError: the numbers are not those of a balance for these layers.

    Example:
        >>> cut_at(CutProblem((0, 1, 0), [[1, 2, 4, 8]] * 3, boundary=0.5), [1, 2, 1]).loads
        (10.0, 7.0)
    """
    if len(balance) != problem.stages or min(balance) < 1 or sum(balance) != problem.layers:
        raise ValueError(
            f"balance is {[*balance]}: wanted {problem.stages} positive numbers, the layers of each stage, that add up "
            f"to {problem.layers}"
        )
    ends = list(accumulate(balance, initial=0))
    each = [_of_worker(problem, ends, worker) for worker in range(problem.workers)]
    loads, memory = zip(*each, strict=True)
    return Cut(tuple(balance), loads, memory, problem)


def _of_worker(problem: CutProblem, ends: Sequence[int], worker: int) -> tuple[float, float]:
    """The load and the memory of a worker."""
    seconds: list[float] = []
    memory: list[float] = []
    for stage in problem.held[worker]:
        start, end = ends[stage], ends[stage + 1]
        seconds += problem.seconds[stage][start:end]
        if len(problem.memory):
            memory += problem.memory[stage][start:end]
        for boundary, place in ((stage - 1, start), (stage, end)):
            if 0 <= boundary < problem.stages - 1 and problem.placement[boundary] != problem.placement[boundary + 1]:
                all_of = problem.boundary
                seconds.append(all_of[boundary][place - 1] if isinstance(all_of, Sequence) else all_of)
    # Equal loads must be equal numbers, whatever the order in which they are added up.
    return math.fsum(seconds), math.fsum(memory)


def fits(cut: Cut) -> bool:
    """Whether each worker's memory is within its limit.

    Example:
        >>> problem = CutProblem((0, 1), [[1, 1, 1]] * 2, [[5, 5, 5]] * 2, limits=[5, 10])
        >>> [fits(cut_at(problem, balance)) for balance in ([1, 2], [2, 1])]
        [True, False]
    """
    limits = cut.problem.limits
    return limits is None or all(size <= limit for size, limit in zip(cut.memory, limits, strict=True))


def neighbours(cut: Cut) -> Iterator[Cut]:
    """All cuts in which one boundary is moved by one layer, and that are within the limits.

    Example:
        >>> [near.balance for near in neighbours(cut_at(CutProblem((0, 1), [[1, 1, 1]] * 2), [1, 2]))]
        [(2, 1)]
    """
    return filter(fits, moved(cut))


def moved(cut: Cut) -> Iterator[Cut]:
    """The same, also beyond the limits.

    Example:
        >>> problem = CutProblem((0, 1), [[1, 1, 1]] * 2, [[5, 5, 5]] * 2, limits=[5, 10])
        >>> [near.balance for near in moved(cut_at(problem, [1, 2]))]
        [(2, 1)]
    """
    ends = list(accumulate(cut.balance, initial=0))
    for boundary in range(1, len(ends) - 1):
        for step in (-1, 1):
            end = ends[boundary] + step
            if ends[boundary - 1] < end < ends[boundary + 1]:
                balance = list(cut.balance)
                balance[boundary - 1] += step
                balance[boundary] -= step
                loads, memory = list(cut.loads), list(cut.memory)
                places = [*ends[:boundary], end, *ends[boundary + 1 :]]
                for worker in {*cut.problem.placement[boundary - 1 : boundary + 1]}:
                    loads[worker], memory[worker] = _of_worker(cut.problem, places, worker)
                yield Cut(tuple(balance), tuple(loads), tuple(memory), cut.problem)
