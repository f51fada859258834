"""The best split of a row of costs into consecutive parts.

A pipeline is as fast as its slowest stage, so the largest sum of a part is minimised, with probes and a bisection over
the sums that occur (A. Pinar and C. Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004). A
probe fills parts greedily up to a cap in one pass. It also returns the nearest cap at which its result changes, so the
bisection steps from sum to sum and ends at the exact optimum.

Greedy parts can leave the last part nearly empty. A dynamic programme over the splits that reach the optimum chooses
the most even one.

Costs are converted to integers first: sums of floats depend on their order, so equal sums could compare as different.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from pipework.assignment.checks import check_partitions

Loads = tuple[int, ...]  # largest first


def minimax_partition(costs: Sequence[float], partitions: int) -> list[int]:
    """Splits consecutive layers into non-empty partitions whose largest cost is as small as possible.

    Among all such splits the second-largest cost is minimal too, then the third, and so on. Where several splits have
    equal costs, the last partitions get as few layers as possible, as with :func:`torch.tensor_split`. The result is
    exact.

    Args:
        costs: The cost of each layer, in any unit: finite and not negative.
        partitions: The number of partitions, from 1 to the number of layers.

    Returns:
        The number of layers of each partition.

    Raises:
        ValueError: The number of partitions or a cost is out of range.

    Example:
        >>> minimax_partition([1, 2, 3, 4, 5, 6], 2)
        [4, 2]
        >>> minimax_partition([9, 1, 1, 1, 1], 3)
        [1, 2, 2]
    """
    check_partitions(partitions, len(costs))
    (sums,) = prefix_sums([costs])
    return _fairest(sums, partitions, _bottleneck(sums, partitions))


def prefix_sums(rows: Sequence[Sequence[float]]) -> list[list[int]]:
    """For each row, sums of the first 0, 1, ... costs, in the largest unit that makes all costs integers.

    Raises:
        ValueError: A cost is infinite, NaN or negative.
    """
    for costs in rows:
        for index, cost in enumerate(costs):
            if not math.isfinite(cost) or cost < 0:
                raise ValueError(f"costs must be finite and not negative, got {cost!r} for layer {index}")
    exact = [[Fraction(cost) for cost in costs] for costs in rows]
    unit = math.lcm(*(cost.denominator for costs in exact for cost in costs))
    return [list(accumulate((int(cost * unit) for cost in costs), initial=0)) for costs in exact]


def _probe(sums: list[int], partitions: int, cap: int) -> tuple[bool, int]:
    """Fills parts up to ``cap``.

    Returns whether ``partitions`` parts suffice. If so, it also returns the largest load: every cap from there to
    ``cap`` suffices. If not, it also returns the smallest sum that did not fit: no cap below that suffices. Empty parts
    do not matter: splitting another part fills them and raises no load.
    """
    parts, start, largest, refused = 1, 0, 0, sums[-1]
    for end in range(1, len(sums)):
        if sums[end] - sums[start] > cap:
            refused = min(refused, sums[end] - sums[start])
            parts, start = parts + 1, end - 1
        largest = max(largest, sums[end] - sums[start])
    return (True, largest) if parts <= partitions else (False, refused)


def _bottleneck(sums: list[int], partitions: int) -> int:
    """The smallest possible largest load."""
    low = max(after - before for before, after in pairwise(sums))
    low = max(low, -(-sums[-1] // partitions))
    high = sums[-1]
    while low < high:
        cap = (low + high) // 2
        enough, load = _probe(sums, partitions, cap)
        if enough:
            high = max(low, load)
        else:
            low = load
    return high


def _fairest(sums: list[int], partitions: int, cap: int) -> list[int]:
    """The split with loads of at most ``cap`` whose loads, sorted in descending order, are lexicographically smallest.

    ``best[end]`` are the loads of the best split of the first ``end`` layers into the parts made so far. They grow with
    ``end``, while the load of the next part shrinks. Both together bound a whole range of places where this part can
    begin, so that most places need not be examined.
    """
    layers = len(sums) - 1
    first, last = _reachable(sums, partitions, cap)
    best: dict[int, Loads] = {0: ()}
    begins: list[dict[int, int]] = []  # for each part: where it begins, if it ends there
    for part in range(1, partitions + 1):
        longer: dict[int, Loads] = {}
        begins.append({})
        lowest, highest = min(best), max(best)
        for end in range(max(part, first[part]), min(layers - partitions + part, last[part]) + 1):
            within = max(lowest, bisect_left(sums, sums[end] - cap))
            longer[end], begins[-1][end] = _begin(sums, best, end, within, min(highest, end - 1))
        best = longer
    return walked_back(begins, layers)


def walked_back(begins: Sequence[dict[int, int]], layers: int) -> list[int]:
    """The number of layers of each part, from where each begins if it ends at a given layer.

    Example:
        >>> walked_back([{2: 0}, {3: 2}], 3)
        [2, 1]
    """
    counts, end = [], layers
    for begin in reversed(begins):
        counts.append(end - begin[end])
        end = begin[end]
    return counts[::-1]


def _begin(sums: list[int], best: dict[int, Loads], end: int, lowest: int, highest: int) -> tuple[Loads, int]:
    """The best loads with a last part that ends at ``end``, and the latest place where that part can begin."""

    def loads(before: int, start: int) -> Loads:
        return tuple(sorted((*best[before], sums[end] - sums[start]), reverse=True))

    found, begin = loads(highest, highest), highest
    ranges = [(lowest, highest - 1)]
    while ranges:
        low, high = ranges.pop()
        if low > high or loads(low, high) >= found:
            continue  # the bound of this range is not better than the best loads so far
        if low == high:
            found, begin = loads(low, low), low
        else:
            middle = (low + high + 1) // 2
            ranges += [(low, middle - 1), (middle, high)]
    return found, begin


def _reachable(sums: list[int], partitions: int, cap: int) -> tuple[list[int], list[int]]:
    """The earliest end of each part, such that the rest still fits, and the latest."""
    layers = len(sums) - 1
    last = [0] * (partitions + 1)
    first = [layers] * (partitions + 1)
    for part in range(1, partitions + 1):
        end = last[part - 1]
        while end < layers and sums[end + 1] - sums[last[part - 1]] <= cap:
            end += 1
        last[part] = end
    for part in range(partitions - 1, -1, -1):
        start = first[part + 1]
        while start > 0 and sums[first[part + 1]] - sums[start - 1] <= cap:
            start -= 1
        first[part] = start
    return first, last
