"""Lower bounds for the bottleneck of any cut."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from pipework.planning.cuts.bisection import WEIGHT
from pipework.planning.cuts.problem import CutProblem
from pipework.planning.cuts.tables import Tables, least_added, tables_of


def bottleneck_bound(problem: CutProblem) -> float:
    """A load that the slowest worker has at least, in every cut, with and without limits.

    The largest of two bounds: the largest layer on its fastest stage; and all layers over the sum of the workers'
    speeds. Speeds are relative to a row of costs that is nowhere larger than the workers' rows divided by their speeds,
    so that it holds for devices that differ in more than a factor. Boundaries add their smallest number.

    Example:
        >>> bottleneck_bound(CutProblem((0, 1), [[1, 2, 3, 4]] * 2))
        5.0
        >>> bottleneck_bound(CutProblem((0, 1), [[1, 2, 3, 4], [2, 4, 6, 8]]))  # 20/3, and sums are integers
        7.0
    """
    tables = tables_of(problem)
    return lowest(tables, [WEIGHT] * problem.workers) / tables.unit


def lowest(tables: Tables, weights: Sequence[int]) -> int:
    """The bound for loads with weights, in thousandths, in the unit of the tables."""
    shares = Shares(tables)
    speeds = sum(speed * WEIGHT / weight for speed, weight in zip(shares.speeds, weights, strict=True))
    work = shares.total + sum(speed * more for speed, more in zip(shares.speeds, least_added(tables), strict=True))
    rows = list({id(row): row for row in tables.sums}.values())
    factor = Fraction(min(weights), WEIGHT)
    largest = max(min(row[place + 1] - row[place] for row in rows) for place in range(tables.places)) * factor
    return max(-(-largest // 1), -(-work // speeds))


class Shares:
    """How much of the work each worker can do at most: what bounds the time of layers that are not placed yet.

    Attributes:
        work: the work of the layers before each place, in a unit of its own; rounded if devices differ.
        total: the work of all layers.
        speeds: the work that each worker does at most, in a time of one.
    """

    def __init__(self, tables: Tables) -> None:
        rows = list({id(row): row for row in tables.sums}.values())
        first = rows[0][-1]
        # A row that is k times the first one has speed 1/k.
        speed = {id(row): Fraction(first, row[-1]) if first and row[-1] else Fraction(1) for row in rows}
        if len(rows) == 1:
            self.work: list[float] | list[int] = rows[0]
            self.total = Fraction(rows[0][-1])
        else:
            exact = [Fraction(0)]
            scaled = [[(after - before) * speed[id(row)] for before, after in pairwise(row)] for row in rows]
            for place in range(tables.places):
                exact.append(exact[-1] + min(row[place] for row in scaled))
            self.work, self.total = list(map(float, exact)), exact[-1]
        self.speeds = [max(speed[id(tables.sums[stage])] for stage in stages) for stages in tables.problem.held]

    def left(self, room: Sequence[int]) -> list[float]:
        """How much work may be left after each number of workers, if the others have this much time.

        Workers take their layers from the outside in: that is, in their order.
        """
        most = [0.0]
        for speed, time in zip(reversed(self.speeds), reversed(room), strict=True):
            most.append(most[-1] + float(speed * time))
        return [value * (1 + 1e-9) for value in reversed(most)]  # more than any error of rounding
