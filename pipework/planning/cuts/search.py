"""The cut with the smallest bottleneck, by the search that suits the placement.

* Linear placement (each worker holds one stage): probes and bisection; exact.
* V placement (p workers, worker d holds the stages d and 2p - 1 - d): nested probes give a cut and a lower bound. If
  they differ, all states are searched for a better cut. Exact, unless there are too many states.
* Other placements: local search from several starts, then a search through all better cuts. Small problems are exact;
  for others, a lower bound tells how far from the optimum the result is at most.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from pipework.planning.cuts.bisection import WEIGHT, Found, caps, smallest, weighted
from pipework.planning.cuts.bounds import Shares, lowest
from pipework.planning.cuts.branches import Branches
from pipework.planning.cuts.fairest import fairest_linear
from pipework.planning.cuts.linear import linear_probe
from pipework.planning.cuts.local_search import LocalSearch
from pipework.planning.cuts.nested import Nested
from pipework.planning.cuts.pairs import Pairs, TooManyError
from pipework.planning.cuts.tables import Places, Tables, with_least_boundaries


@dataclass(frozen=True)
class Effort:
    """How much a search may do. One step takes about a microsecond.

    Attributes:
        fair: steps of the search for the fairest of the best cuts, divided by the number of workers, whose loads each
            step sorts.
        exact: steps of the exact search for V placement.
        branches: steps of the exact search for other placements than linear and V.
        moves: moves that the local search looks at.
        width: states that the nested probe keeps for large problems.
        precision: by which share the lower bound of large problems with V placement may be missed, and the smallest
            bottleneck by a search that is not exact.
    """

    fair: int = 4_000_000
    exact: int = 1_000_000
    branches: int = 50_000
    moves: int = 60_000
    width: int = 64
    precision: float = 0.01


QUICK = Effort(fair=0, exact=0, moves=10_000, width=16, precision=0.002)
DEEP = 100  # stages up to which a search goes stage by stage
FEW = 400  # places up to which a problem with V placement is not large


def is_linear(placement: Sequence[int]) -> bool:
    """Whether each worker holds one stage.

    Example:
        >>> is_linear((0, 1, 2)), is_linear((0, 1, 1, 0))
        (True, False)
    """
    return len({*placement}) == len(placement)


def is_nested(placement: Sequence[int]) -> bool:
    """Whether workers, in some order, hold the first and the last stage, the second one and the second last, and so on.

    Example:
        >>> is_nested((0, 1, 1, 0)), is_nested((0, 1, 0, 1))
        (True, False)
    """
    half = len(placement) // 2
    return tuple(placement[:half]) == tuple(placement[::-1][:half]) and len({*placement}) * 2 == len(placement)


def optimum(tables: Tables, weights: Sequence[int], effort: Effort, start: Places | None = None) -> Found | None:
    """The cut with the smallest largest weighted load, and of several the fairest one.

    Args:
        tables: a problem whose workers are numbered in the order of their first stages.
        weights: the factor of each worker's load, in thousandths.
        effort: how much the search may do.
        start: a cut within the limits, from which a local search also starts.

    Returns:
        The cut and what is proven of it; None if none is within the limits, or none was found.
    """
    placement = tables.problem.placement
    if is_linear(placement):
        return _linear(tables, weights, effort)
    if is_nested(placement):
        return _nested(tables, weights, effort, start)
    return _other(tables, weights, effort, start)


def _linear(tables: Tables, weights: Sequence[int], effort: Effort) -> Found | None:
    precision = 0 if effort.exact else effort.precision
    found = smallest(tables, linear_probe(tables), lowest(tables, weights), weights, precision=precision)
    if found is None:
        return None
    try:
        fair = fairest_linear(tables, caps(found.highest, weights), weights, effort.fair // len(weights))
    except TooManyError:
        fair = LocalSearch(tables, weights, effort.moves).improved(found.cut)
    assert fair is not None
    return replace(found, cut=fair)


def _nested(tables: Tables, weights: Sequence[int], effort: Effort, start: Places | None) -> Found | None:
    cheap, shares = with_least_boundaries(tables), Shares(tables)
    assert cheap.added is not None
    low = lowest(tables, weights)
    large = tables.places > FEW
    some = Nested(cheap, shares, cheap.added, width=effort.width if large or not effort.exact else None)
    upper = smallest(cheap, some.probe, low, weights)
    if effort.exact:
        every = Nested(cheap, shares, cheap.added, empty=True)
        precision = effort.precision if large else 0
        relaxed = smallest(cheap, every.probe, low, weights, None if upper is None else upper.cut, precision)
        if relaxed is None:
            return None
        low = relaxed.lowest
    search = LocalSearch(tables, weights, effort.moves)
    known = [cut for cut in (start, None if upper is None else upper.cut) if cut is not None]
    cut = _improved(search, known)
    if cut is None or search.key(cut)[0]:  # the staircase missed all cuts, or all that are within the limits
        other = _other(tables, weights, effort, None)
        cut = None if other is None else other.cut
    return _proven(tables, shares, weights, effort, cut, low)


def _proven(
    tables: Tables, shares: Shares, weights: Sequence[int], effort: Effort, cut: Places | None, low: int
) -> Found | None:
    """The best cut for V placement, not worse than one that is known; proven to be the best if there are steps left."""
    if cut is None:
        high = sum(row[-1] for row in tables.ends) * max(weights) // WEIGHT + 1
    else:
        high = weighted(tables, cut, weights)
    try:
        pairs = Pairs(tables, shares, weights, fairest=True, steps=effort.fair // len(weights))
        best = pairs.best(caps(high, weights))
        return None if best is None else Found(best, *[weighted(tables, best, weights)] * 2)
    except TooManyError:
        pass
    if cut is None or low >= high:
        return None if cut is None else Found(cut, high, high)
    try:
        best = Pairs(tables, shares, weights, fairest=False, steps=effort.exact).best(caps(high - 1, weights))
    except TooManyError:
        return Found(cut, high, low)
    if best is None:
        return Found(cut, high, high)
    cut = LocalSearch(tables, weights, effort.moves).improved(best)
    return Found(cut, *[weighted(tables, cut, weights)] * 2)


def _other(tables: Tables, weights: Sequence[int], effort: Effort, start: Places | None) -> Found | None:
    """Local search from a few starts; of small problems a search through all better cuts; else from more starts."""
    search = LocalSearch(tables, weights, effort.moves)
    starts = iter([start]) if start is not None else _starts(tables, weights)
    best = _improved(search, list(islice(starts, 3)))
    if effort.exact and len(tables.sums) <= DEEP:
        high = sum(row[-1] for row in tables.ends) * max(weights) // WEIGHT + 1
        if best is not None and not search.key(best)[0]:
            high = weighted(tables, best, weights)
        try:
            better = Branches(tables, weights, effort.branches).better(high)
        except TooManyError:
            pass
        else:
            best = best if better is None else search.improved(better)
            if best is None or search.key(best)[0]:
                return None
            return Found(best, *[weighted(tables, best, weights)] * 2)
    while search.steps > 0:
        begin = next(starts, None)
        if begin is None:
            break
        search.steps -= 10 * len(begin)  # for the start, even if no move is possible from it
        cut = search.improved(begin)
        best = cut if best is None else min(best, cut, key=search.key)
    if best is None or search.key(best)[0]:
        return None
    return Found(best, weighted(tables, best, weights), lowest(tables, weights))


def _improved(search: LocalSearch, starts: Sequence[Places]) -> Places | None:
    """The best cut that is found from the starts, which may exceed the limits."""
    return min(map(search.improved, starts), key=search.key, default=None)


def _starts(tables: Tables, weights: Sequence[int]) -> Iterator[Places]:
    """Cuts that are even over stages, not over workers: by time, by memory, then with random weights of stages."""
    placement = tables.problem.placement
    stages = len(placement)
    alone = replace(
        tables,
        problem=replace(tables.problem, placement=tuple(range(stages)), limits=None),
        limits=[tables.memory[0][-1] + max(row[-1] for row in tables.memory)] * stages,
        added=[0] * stages,
        begins=tables.sums,
        ends=tables.sums,
    )
    of_stage = [weights[worker] for worker in placement]
    yield _even(alone, of_stage)
    if tables.memory[0][-1]:
        room = [max(tables.limits[worker], 1) for worker in placement]
        by_memory = replace(alone, sums=tables.memory, begins=tables.memory, ends=tables.memory)
        yield _even(by_memory, [max(1, WEIGHT * max(room) // each) for each in room])
    chance = random.Random(0)
    while True:
        yield _even(alone, [int(weight * chance.uniform(0.6, 1.6)) for weight in of_stage])


def _even(alone: Tables, weights: Sequence[int]) -> Places:
    found = smallest(alone, linear_probe(alone), 0, weights, precision=0.01)
    assert found is not None
    return found.cut
