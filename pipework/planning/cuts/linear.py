"""Probes for linear placement: is there a cut whose stages are all within their caps?

Each worker holds one stage. From the first stage on, a probe finds the places at which a stage can end such that all
stages up to it are within their caps and limits. These are all places between the first and the last, unless a layer
is too large for a stage (on a slow device, or for a small limit), which leaves gaps; so they are kept as a list of
ranges. A probe takes O(p log n) then. The idea of a probe is that of A. Pinar and C. Aykanat, "Fast optimal load
balancing algorithms for 1D partitioning", 2004.

Where the seconds that a boundary adds depend on its place, a stage that begins later is not always faster. Then a
window slides over the places at which a stage can begin, and keeps those that may be the best for an end still to come:
O(n p).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from pipework.planning.cuts.bisection import Probe
from pipework.planning.cuts.tables import Places, Tables

Range = tuple[int, int]  # both ends belong to it


def linear_probe(tables: Tables) -> Probe:
    """The probe for a linear placement.

    Example:
        >>> from pipework.planning.cuts.problem import CutProblem
        >>> from pipework.planning.cuts.tables import tables_of
        >>> probe = linear_probe(tables_of(CutProblem((0, 1), [[1, 2, 3, 4]] * 2)))
        >>> probe([6, 4]), probe([5, 5])
        ([0, 3, 4], None)
    """
    if tables.added is None:
        return lambda caps: _by_windows(tables, caps)
    ranges = _Ranges(tables, tables.added)
    return ranges.probe


class _Ranges:
    """The probe where the place of a boundary does not matter."""

    def __init__(self, tables: Tables, added: list[int]) -> None:
        self._tables = tables
        self._added = added
        rows = {id(row): row for row in (*tables.sums, *tables.memory)}
        self._largest = {key: max(after - before for before, after in pairwise(row)) for key, row in rows.items()}

    def probe(self, caps: Sequence[int]) -> Places | None:
        """See :func:`linear_probe`."""
        tables, placement = self._tables, self._tables.problem.placement
        stages = len(placement)
        reached: list[list[Range]] = [[(0, 0)]]
        room = [caps[worker] - self._added[worker] for worker in placement]
        for stage in range(stages):
            last = tables.places - (stages - 1 - stage)
            ends = self._ends(stage, reached[-1], room[stage], last)
            if not ends:
                return None
            reached.append(ends)
        if reached[-1][-1][1] != tables.places:
            return None
        cut = [tables.places]
        for stage in range(stages - 1, -1, -1):
            # If some begin is possible, so is each later one, which leaves less to this stage.
            high = next(high for low, high in reversed(reached[stage]) if low < cut[-1])
            cut.append(min(high, cut[-1] - 1))
        return cut[::-1]

    def _ends(self, stage: int, begins: list[Range], room: int, last: int) -> list[Range]:
        """The places at which a stage can end that begins in one of the ranges."""
        tables = self._tables
        sums, memory = tables.sums[stage], tables.memory[stage]
        limit = tables.limits[tables.problem.placement[stage]]
        if self._largest[id(sums)] > room or self._largest[id(memory)] > limit:
            begins = self._without_large(begins, sums, memory, room, limit)
        ends: list[Range] = []
        for low, high in begins:
            reach = min(bisect_right(sums, sums[high] + room), bisect_right(memory, memory[high] + limit)) - 1
            low, reach = low + 1, min(reach, last)
            if low > reach:
                continue
            if ends and low <= ends[-1][1] + 1:
                ends[-1] = (ends[-1][0], max(reach, ends[-1][1]))
            else:
                ends.append((low, reach))
        return ends

    def _without_large(
        self, begins: list[Range], sums: list[int], memory: list[int], room: int, limit: int
    ) -> list[Range]:
        """The ranges without the places before a layer that is too large."""
        kept: list[Range] = []
        for low, high in begins:
            start = low
            for place in range(low, min(high, self._tables.places - 1) + 1):
                if sums[place + 1] - sums[place] > room or memory[place + 1] - memory[place] > limit:
                    if start < place:
                        kept.append((start, place - 1))
                    start = place + 1
            if start <= high:
                kept.append((start, high))
        return kept


def _by_windows(tables: Tables, caps: Sequence[int]) -> Places | None:
    """The probe where the place of a boundary matters."""
    placement = tables.problem.placement
    stages, places = len(placement), tables.places
    reached = [0]
    begins_of: list[dict[int, int]] = []  # for each stage: where it can begin, if it ends there
    for stage, worker in enumerate(placement):
        sums, memory = tables.sums[stage], tables.memory[stage]
        begin, end_sums = tables.begins[stage], tables.ends[stage]
        cap, limit = caps[worker], tables.limits[worker]
        found: dict[int, int] = {}
        window: deque[int] = deque()  # the best begins for ends still to come, the best first
        following = 0
        for end in range(reached[0] + 1, places - (stages - 1 - stage) + 1):
            if sums[end] - sums[reached[-1]] > cap:
                break  # boundaries only add to that
            while following < len(reached) and reached[following] < end:
                value = begin[reached[following]]
                while window and begin[window[-1]] <= value:
                    window.pop()
                window.append(reached[following])
                following += 1
            while window and memory[end] - memory[window[0]] > limit:
                window.popleft()
            if window and end_sums[end] - begin[window[0]] <= cap:
                found[end] = window[0]
        if not found:
            return None
        begins_of.append(found)
        reached = list(found)
    if reached[-1] != places:
        return None
    cut = [places]
    for found in reversed(begins_of):
        cut.append(found[cut[-1]])
    return cut[::-1]
