"""The fairest of the cuts for linear placement that respect caps: the second-largest load is minimal, too, and so on.

A dynamic programme over (stage, its end) whose values are loads, largest first. Only ends are looked at from which the
stages before and those after can be within their caps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from pipework.planning.cuts.bisection import WEIGHT
from pipework.planning.cuts.pairs import Loads, TooManyError
from pipework.planning.cuts.tables import Places, Tables


def fairest_linear(tables: Tables, caps: Sequence[int], weights: Sequence[int], steps: int) -> Places | None:
    """The fairest cut within the caps; None if there is none.

    Args:
        tables: the problem.
        caps: the largest load of each worker.
        weights: the factor of each worker's load, in thousandths, by which loads are compared.
        steps: how many pairs of a stage's begin and end it may look at.

    Raises:
        TooManyError: there are too many.
    """
    placement = tables.problem.placement
    earliest = _earliest_ends(tables, caps)
    best: dict[int, Loads] = {0: ()}
    begin_of: list[dict[int, int]] = []
    for stage, worker in enumerate(placement):
        sums, memory, begins, ends = tables.sums[stage], tables.memory[stage], tables.begins[stage], tables.ends[stage]
        cap, limit, weight = caps[worker], tables.limits[worker], weights[worker]
        longer: dict[int, Loads] = {}
        begin_of.append({})
        last = tables.places - (len(placement) - 1 - stage)
        starts = sorted(best)
        for end in range(max(starts[0] + 1, earliest[stage + 1]), last + 1):
            if sums[end] - sums[starts[-1]] > cap:
                break
            low = max(bisect_left(sums, sums[end] - cap), bisect_left(memory, memory[end] - limit))
            for index in range(bisect_left(starts, end) - 1, -1, -1):
                start = starts[index]
                if start < low:
                    break
                steps -= 1
                load = ends[end] - begins[start]
                if load > cap:
                    continue
                loads = tuple(sorted((*best[start], load * weight // WEIGHT), reverse=True))
                if end not in longer or loads < longer[end]:
                    longer[end], begin_of[-1][end] = loads, start
            if steps < 0:
                raise TooManyError
        if not longer:
            return None
        best = longer
    if tables.places not in best:
        return None
    cut = [tables.places]
    for before in reversed(begin_of):
        cut.append(before[cut[-1]])
    return cut[::-1]


def _earliest_ends(tables: Tables, caps: Sequence[int]) -> list[int]:
    """The earliest end of each number of stages such that the rest can be within its caps, if stages may be empty."""
    placement = tables.problem.placement
    ends = [tables.places]
    for stage in range(len(placement) - 1, -1, -1):
        sums, memory, worker = tables.sums[stage], tables.memory[stage], placement[stage]
        by_time = bisect_left(sums, sums[ends[-1]] - caps[worker])
        ends.append(max(by_time, bisect_left(memory, memory[ends[-1]] - tables.limits[worker])))
    return ends[::-1]
