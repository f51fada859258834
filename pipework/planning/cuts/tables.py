"""A problem in integers: prefix sums of its rows, and the places where a cut may be.

Sums of floats depend on their order, so equal sums could compare as different, and an exact optimum could be missed.
Each float is a fraction whose denominator is a power of two, so one unit makes all of them integers.

A place is the number of layers before it, from 0 to `places`. A cut is a list of places here, the first 0 and the last
`places`; stage s has the layers between place s and place s + 1 of the list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise

from pipework.planning.cuts.problem import CutProblem

Places = list[int]


@dataclass(frozen=True, eq=False)
class Tables:
    """A problem in integers.

    Attributes:
        problem: the problem.
        sums: for each stage, the seconds of the layers before each place.
        begins: the same, less what the boundary at that place adds if the stage begins there.
        ends: the same, with what the boundary adds if the stage ends there. The time of a stage from place i to place j
            is ``ends[j] - begins[i]``.
        memory: for each stage, the bytes of the layers before each place.
        limits: the bytes of each worker.
        added: for each worker, what its boundaries add to its load, wherever they are; None: that depends on the place.
        unit: how many of these integers are a second.
        byte: how many of these integers are a byte.
    """

    problem: CutProblem
    sums: list[list[int]]
    begins: list[list[int]]
    ends: list[list[int]]
    memory: list[list[int]]
    limits: list[int]
    added: list[int] | None
    unit: int
    byte: int

    @property
    def places(self) -> int:
        """The number of the last place."""
        return self.problem.layers

    def time(self, stage: int, cut: Sequence[int]) -> int:
        """The time of a stage."""
        return self.ends[stage][cut[stage + 1]] - self.begins[stage][cut[stage]]

    def size(self, stage: int, cut: Sequence[int]) -> int:
        """The bytes of a stage."""
        return self.memory[stage][cut[stage + 1]] - self.memory[stage][cut[stage]]

    def loads(self, cut: Sequence[int]) -> list[int]:
        """The load of each worker."""
        return [sum(self.time(stage, cut) for stage in stages) for stages in self.problem.held]

    def sizes(self, cut: Sequence[int]) -> list[int]:
        """The bytes of each worker."""
        return [sum(self.size(stage, cut) for stage in stages) for stages in self.problem.held]

    def balance(self, cut: Sequence[int]) -> list[int]:
        """The number of layers of each stage."""
        return [after - before for before, after in pairwise(cut)]


def tables_of(problem: CutProblem) -> Tables:
    """The integers of a problem.

    Example:
        >>> tables = tables_of(CutProblem((0, 1), [[0.5, 1, 2]] * 2, boundary=0.25))
        >>> tables.unit, tables.sums[0], tables.ends[0]
        (4, [0, 2, 6, 14], [1, 3, 7, 15])
    """
    rows = problem.boundary if isinstance(problem.boundary, Sequence) else [[problem.boundary]]
    unit = _unit([*_distinct(problem.seconds), *_distinct(rows)])
    sums = _prefix_sums(problem.seconds, unit)
    begins, ends = sums[:], sums[:]
    added: list[int] | None = [0] * problem.workers
    for boundary, sides in enumerate(pairwise(problem.placement)):
        if sides[0] == sides[1]:
            continue
        if isinstance(problem.boundary, Sequence):
            crossing = [_integer(each, unit) for each in problem.boundary[boundary]]
        else:
            crossing = [_integer(problem.boundary, unit)] * (problem.layers - 1)
        if added is not None and len({*crossing}) == 1:
            for worker in sides:
                added[worker] += crossing[0]
        else:
            added = None
        if any(crossing):
            # No stage ends at the first place or begins at the last, so what is added there does not matter.
            around = [crossing[0], *crossing, crossing[-1]]
            ends[boundary] = [total + more for total, more in zip(sums[boundary], around, strict=True)]
            begins[boundary + 1] = [total - more for total, more in zip(sums[boundary + 1], around, strict=True)]
    byte = _unit(_distinct(problem.memory))
    memory = _prefix_sums(problem.memory, byte) or [[0] * (problem.layers + 1)] * problem.stages
    every = sum(row[-1] for row in memory)  # as good as infinite
    limits = [every] * problem.workers
    if problem.limits is not None:
        limits = [min(every, _most(limit, byte)) if limit < math.inf else every for limit in problem.limits]
    return Tables(problem, sums, begins, ends, memory, limits, added, unit, byte)


def least_added(tables: Tables) -> list[int]:
    """What the boundaries add to each worker's load at least."""
    return [sum(sum(_least(tables, stage)) for stage in stages) for stages in tables.problem.held]


def with_least_boundaries(tables: Tables) -> Tables:
    """The same problem with boundaries that add their smallest number wherever they are.

    The loads of its cuts are not larger, so what bounds them bounds those of the problem.
    """
    if tables.added is not None:
        return tables
    least = [_least(tables, stage) for stage in range(len(tables.sums))]
    return replace(
        tables,
        begins=[[value - more for value in row] for row, (more, _) in zip(tables.sums, least, strict=True)],
        ends=[[value + more for value in row] for row, (_, more) in zip(tables.sums, least, strict=True)],
        added=least_added(tables),
    )


def _least(tables: Tables, stage: int) -> tuple[int, int]:
    """What the boundaries before and after a stage add to its time at least."""
    sums, begins, ends = tables.sums[stage], tables.begins[stage], tables.ends[stage]
    inner = range(1, tables.places)
    before = 0 if begins is sums else min(sums[place] - begins[place] for place in inner)
    after = 0 if ends is sums else min(ends[place] - sums[place] for place in inner)
    return before, after


def _most(limit: float, byte: int) -> int:
    """The largest integer that is not above the limit once it is rounded, as the memory of a cut is."""
    most = int((Fraction(limit) + Fraction(math.ulp(limit)) / 2) * byte)
    return most if most / byte <= limit else most - 1


def _distinct(rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Rows without repeated objects."""
    return list({id(row): row for row in rows}.values())


def _unit(rows: Iterable[Sequence[float]]) -> int:
    """The largest denominator, of which the others are divisors."""
    return max((value.as_integer_ratio()[1] for row in rows for value in row), default=1)


def _integer(value: float, unit: int) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * (unit // denominator)


def _prefix_sums(rows: Sequence[Sequence[float]], unit: int) -> list[list[int]]:
    """For each row, its sums before each place. Equal rows share a list."""
    made: dict[tuple[float, ...], list[int]] = {}
    found: dict[int, list[int]] = {}
    for row in rows:
        if id(row) not in found:
            key = tuple(row)
            if key not in made:
                made[key] = list(accumulate((_integer(value, unit) for value in row), initial=0))
            found[id(row)] = made[key]
    return [found[id(row)] for row in rows]
