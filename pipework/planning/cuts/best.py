"""The few best cuts, different from each other, of which a simulation may choose.

A step takes longer than micro-batches times bottleneck: the pipeline is filled and drained, transfers take time, and
limits of memory make workers wait. Which of several good cuts is the fastest depends on that. So the result has, beside
the smallest bottleneck, cuts that give the first or the last worker less, and what one moved boundary makes of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipework.planning.cuts.bisection import WEIGHT
from pipework.planning.cuts.cut import Cut, cut_at, fits, moved
from pipework.planning.cuts.limits import check_layers, no_cut, smallest_limit
from pipework.planning.cuts.problem import CutProblem
from pipework.planning.cuts.search import FEW, QUICK, Effort, optimum
from pipework.planning.cuts.tables import Places, Tables, tables_of


@dataclass(frozen=True)
class BestCut:
    """The best cut that was found.

    Attributes:
        cut: the cut.
        bound: no cut within the limits has a smaller bottleneck. Where it equals the cut's, that is proven to be the
            smallest.
    """

    cut: Cut
    bound: float


def best_cut(problem: CutProblem, effort: Effort | None = None) -> BestCut:
    """The cut with the smallest bottleneck within the limits.

    The bottleneck is exact for linear placement, and for V placement of some hundred layers. Among such cuts, the
    second-largest load of a worker is minimal too, and so on; exactly, if there are not too many of them.

    Args:
        problem: what is to be cut.
        effort: how much the search may do; None: up to some seconds.

    Raises:
        ValueError: no cut is within the limits, or for other than linear and V placement, none was found.

    Example:
        >>> best = best_cut(CutProblem((0, 1, 1, 0), [[4, 1, 1, 1, 1]] * 4))
        >>> best.cut.balance, best.cut.loads, best.bound
        ((1, 1, 2, 1), (5.0, 3.0), 5.0)
    """
    check_layers(problem)
    return _best(problem, tables_of(problem.renumbered()), effort or Effort())[0]


def nearest_cut(problem: CutProblem, effort: Effort | None = None) -> Cut:
    """The cut of :func:`best_cut`; if none is within the limits, the one for which the smallest larger ones are enough.

    Args:
        problem: what is to be cut.
        effort: how much the search may do; None: up to some seconds.

    Example:
        >>> nearest_cut(CutProblem((0, 1), [[1] * 4] * 2, memory=[[3, 1, 1, 1]] * 2, limits=[2, 4])).balance
        (1, 3)
    """
    tables = tables_of(problem.renumbered())
    found = optimum(tables, [WEIGHT] * problem.workers, effort or Effort())
    return smallest_limit(problem, effort).cut if found is None else cut_at(problem, tables.balance(found.cut))


def best_cuts(problem: CutProblem, count: int = 8) -> list[Cut]:
    """The few best cuts within the limits, different from each other.

    The first is as good as that of :func:`best_cut`, or better. Others have a somewhat larger bottleneck, and less for
    the worker of the first stage, of the last one, or both; or one boundary at another place.

    Args:
        problem: what is to be cut.
        count: how many cuts are wanted. If there are not so many, the result has fewer.

    Returns:
        The cuts, those with the smallest bottleneck first, and of equal ones the fairest: that whose second-largest
        load is smallest, and so on.

    Raises:
        ValueError: no cut is within the limits, or for other than linear and V placement, none was found; or the count
            is less than 1.

    Example:
        >>> for cut in best_cuts(CutProblem((0, 1), [[3, 1, 1, 1, 3]] * 2), count=3):
        ...     print(cut.balance, cut.loads)
        (3, 2) (5.0, 4.0)
        (2, 3) (4.0, 5.0)
        (4, 1) (6.0, 3.0)
    """
    if count < 1:
        raise ValueError(f"count is {count}: wanted at least 1 cut")
    check_layers(problem)
    tables = tables_of(problem.renumbered())
    best, places = _best(problem, tables, Effort())
    chosen = {best.cut.balance: best.cut}
    others: dict[tuple[int, ...], Cut] = {}
    for cut in _relieved(problem, tables, places) if count > 1 else ():
        others.setdefault(cut.balance, cut)
    for cut in sorted(others.values(), key=rank):
        if len(chosen) <= count // 2:
            chosen.setdefault(cut.balance, cut)
    for cut in sorted(_near([*chosen.values(), *others.values()], count), key=rank):
        if len(chosen) < count:
            chosen.setdefault(cut.balance, cut)
    return sorted(chosen.values(), key=rank)


def rank(cut: Cut) -> tuple[list[float], tuple[int, ...]]:
    """By what cuts are ordered: their loads, largest first; then, few layers on the last stages.

    Example:
        >>> rank(cut_at(CutProblem((0, 1), [[1, 2, 4]] * 2), [2, 1]))
        ([4.0, 3.0], (1, 2))
    """
    return sorted(cut.loads, reverse=True), cut.balance[::-1]


def _best(problem: CutProblem, tables: Tables, effort: Effort) -> tuple[BestCut, Places]:
    found = optimum(tables, [WEIGHT] * problem.workers, effort)
    if found is None:
        raise no_cut(problem)
    cut = cut_at(problem, tables.balance(found.cut))
    bound = cut.bottleneck if found.highest == found.lowest else found.lowest / tables.unit
    return BestCut(cut, bound), found.cut


def _relieved(problem: CutProblem, tables: Tables, places: Places) -> Iterator[Cut]:
    """Cuts that give less to the workers of the outer stages, whose load fills and drains the pipeline."""
    placement = tables.problem.placement
    first, last = placement[0], placement[-1]
    middle = placement[len(placement) // 2]
    shares = (20, 50, 100, 200) if tables.places <= FEW else (50, 150)  # thousandths
    for workers in dict.fromkeys(((first,), (last,), tuple({first, last}), (middle,))):
        for more in shares:
            weights = [WEIGHT + more if worker in workers else WEIGHT for worker in range(problem.workers)]
            found = optimum(tables, weights, QUICK, places)
            if found is not None:
                yield cut_at(problem, tables.balance(found.cut))


def _near(cuts: Iterable[Cut], count: int) -> list[Cut]:
    """The given cuts and neighbours of the best of them, several times as many as are wanted, if there are."""
    within = {cut.balance: cut for cut in cuts}
    beyond: dict[tuple[int, ...], Cut] = {}  # the limits, past which others may be
    seen: set[tuple[int, ...]] = set()
    while len(seen) < 2 or (len(within) < 4 * count and len(seen) < 4 * count):
        new = [cut for known in (within, beyond) for cut in known.values() if cut.balance not in seen]
        if not new:
            break
        cut = min(new, key=lambda each: (each.balance in beyond, rank(each)))
        seen.add(cut.balance)
        for near in moved(cut):
            (within if fits(near) else beyond).setdefault(near.balance, near)
    return list(within.values())
