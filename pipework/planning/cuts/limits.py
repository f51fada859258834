"""How large the workers' memory must be, and errors where it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from pipework.planning.cuts.bisection import WEIGHT
from pipework.planning.cuts.cut import Cut, cut_at
from pipework.planning.cuts.problem import CutProblem
from pipework.planning.cuts.search import Effort, optimum
from pipework.planning.cuts.tables import Tables, tables_of


@dataclass(frozen=True)
class SmallestLimit:
    """The smallest limits that are enough.

    Attributes:
        factor: what all limits would have to be multiplied by; 1 or less: they are enough.
        cut: the cut that needs them.
        bound: no smaller factor is enough. Where it equals the factor, that is proven to be the smallest.
    """

    factor: float
    cut: Cut
    bound: float


def smallest_limit(problem: CutProblem, effort: Effort | None = None) -> SmallestLimit:
    """The smallest factor by which all limits could be multiplied such that some cut is within them.

    The largest share of a worker's memory in its limit is minimised as the largest load is elsewhere. The factor is
    exact for linear placement, and for V placement of some hundred layers.

    Args:
        problem: what is to be cut.
        effort: how much the search may do; None: up to some seconds.

    Raises:
        ValueError: there are no limits.

    Example:
        >>> problem = CutProblem((0, 1), [[1] * 4] * 2, memory=[[3, 1, 1, 1]] * 2, limits=[2, 4])
        >>> smallest = smallest_limit(problem)
        >>> smallest.factor, smallest.cut.balance
        (1.5, (1, 3))
    """
    if problem.limits is None:
        raise ValueError("limits is None: wanted the bytes of each worker, whose factor is looked for")
    ordered = problem.renumbered()
    assert ordered.limits is not None
    shares, unit = _shares_of_limits(tables_of(ordered), ordered.limits)
    found = optimum(shares, [WEIGHT] * problem.workers, effort or Effort())
    assert found is not None
    cut = cut_at(problem, shares.balance(found.cut))
    return SmallestLimit(found.highest / unit, cut, found.lowest / unit)


def check_layers(problem: CutProblem) -> None:
    """Checks that each layer is within the limit of some worker.

    Raises:
        ValueError: a layer is too large for all stages.

    Example:
        >>> check_layers(CutProblem((0, 1), [[1, 1]] * 2, memory=[[1, 9]] * 2, limits=[4, 5]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: layer 1 is too large for every worker: 9 bytes are needed on stage 1, whose worker 1 has 5, ...
    """
    if problem.limits is None or not len(problem.memory):
        return
    ordered = tables_of(problem)
    limits = [problem.limits[worker] for worker in problem.placement]
    for layer in range(problem.layers):
        if any(
            row[layer + 1] - row[layer] <= ordered.limits[worker]
            for row, worker in zip(ordered.memory, problem.placement, strict=True)
        ):
            continue
        needs = [row[layer] for row in problem.memory]
        stage = min(range(problem.stages), key=lambda each: needs[each] / limits[each])
        raise ValueError(
            f"layer {layer} is too large for every worker: {needs[stage]:.15g} bytes are needed on stage {stage}, "
            f"whose worker {problem.placement[stage]} has {limits[stage]:.15g}, and on the others it fits no better; "
            "cut it into smaller layers, recompute, or have fewer micro-batches in flight"
        )


def no_cut(problem: CutProblem) -> ValueError:
    """The error for limits within which no cut was found."""
    assert problem.limits is not None
    found = smallest_limit(problem)
    shown = ", ".join(f"{limit:.6g}" for limit in problem.limits[:8]) + (", ..." if problem.workers > 8 else "")
    if found.factor == found.bound:
        what = "the smallest that are enough"
    else:
        what = f"the smallest found to be enough (no factor below {found.bound:.6g} is)"
    return ValueError(
        f"no cut of {problem.layers} layers into {problem.stages} stages is within the limits [{shown}]: {what} are "
        f"{found.factor:.6g} times as large, for balance {[*found.cut.balance]}; raise the limits, recompute, or use "
        "more workers"
    )


def _shares_of_limits(tables: Tables, limits: Sequence[float]) -> tuple[Tables, int]:
    """A problem whose loads are the shares of workers' memory in their limits, and the unit of these."""
    exact = [Fraction(0) if limit == math.inf else 1 / Fraction(limit) for limit in limits]
    unit = math.lcm(*(share.denominator for share in exact))
    factors = [int(share * unit) for share in exact]
    made: dict[tuple[int, int], list[int]] = {}  # stages whose rows are one list still share one
    for row, worker in zip(tables.memory, tables.problem.placement, strict=True):
        key = id(row), factors[worker]
        if key not in made:
            made[key] = [value * factors[worker] for value in row]
    sums = [made[id(row), factors[at]] for row, at in zip(tables.memory, tables.problem.placement, strict=True)]
    none = [[0] * len(row) for row in sums[:1]] * len(sums)
    shares = replace(
        tables, sums=sums, begins=sums, ends=sums, memory=none, limits=[0] * len(limits), added=[0] * len(limits)
    )
    return shares, unit * tables.byte
