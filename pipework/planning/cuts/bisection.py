"""The smallest cap for which a probe finds a cut, exactly, in few probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipework.planning.cuts.tables import Places, Tables

Probe = Callable[[Sequence[int]], Places | None]
"""Finds a cut in which each worker's load is at most its cap, if there is one. A cap may be negative."""

WEIGHT = 1000  # the usual weight of a worker's load


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        cut: the best cut.
        highest: its largest weighted load.
        lowest: no cut has a smaller one. The cut is proven to be the best where both are equal.
    """

    cut: Places
    highest: int
    lowest: int


def caps(cap: int, weights: Sequence[int]) -> list[int]:
    """The largest load of each worker whose weighted load is at most the cap."""
    return [cap * WEIGHT // weight for weight in weights]


def weighted(tables: Tables, cut: Sequence[int], weights: Sequence[int]) -> int:
    """The largest weighted load, rounded up."""
    return max(-(-load * weight // WEIGHT) for load, weight in zip(tables.loads(cut), weights, strict=True))


def smallest(
    tables: Tables,
    probe: Probe,
    low: int,
    weights: Sequence[int],
    start: Places | None = None,
    precision: float = 0,
) -> Found | None:
    """The cut with the smallest largest weighted load that a probe finds.

    Bisection, where each cut that is found lowers the upper end to what it has reached. Since loads seldom differ by
    less than a billionth, the upper end is the optimum once the rest of the range is that small, and one more probe,
    just below it, shows it.

    Args:
        tables: the problem.
        probe: finds a cut, or none.
        low: no cut has a smaller largest load.
        weights: the factor of each worker's load, in thousandths.
        start: a cut that is known.
        precision: the share by which the result may be larger than the optimum.

    Returns:
        The cut; None if there is none for any cap.
    """
    cut = start
    if cut is None:
        every = sum(max(row) for row in tables.ends) - sum(min(row) for row in tables.begins)
        cut = probe([every] * tables.problem.workers)
    if cut is None:
        return None
    high = weighted(tables, cut, weights)
    low = min(low, high)
    first = True
    while low < high - int(high * precision):
        # Most optima are near the lower bound, which the loads of thousands of layers reach almost.
        cap = low + (high - low) // 8 if first else (low + high) // 2
        first = False
        if (high - low) << 30 < high:
            cap = high - 1
        found = probe(caps(cap, weights))
        if found is None:
            low = cap + 1
        else:
            cut, high = found, min(cap, weighted(tables, found, weights))
    return Found(cut, high, low)
