"""The best split of a row of layers into consecutive parts, whose devices may differ.

A pipeline is as fast as its slowest stage, so the largest sum of a part is minimised. A dynamic programme over (part,
end) keeps, for each number of first layers, the best loads of the parts so far. Costs are converted to integers first:
sums of floats depend on their order, so equal sums could compare as different.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from pipework.assignment.balance import check_partitions

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
    return minimax_on_devices([costs] * partitions)


def minimax_on_devices(costs: Sequence[Sequence[float]]) -> list[int]:
    """As `minimax_partition`, where a layer has another cost on the device of each partition.

    Args:
        costs: For each partition, the cost of each layer on its device, in one unit.

    Raises:
        ValueError: There are more partitions than layers, or a cost is out of range.

    Example:
        >>> fast, slow = [1, 1, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5]
        >>> minimax_on_devices([fast, slow])
        [5, 1]
    """
    partitions, layers = len(costs), max(map(len, costs), default=0)
    check_partitions(partitions, layers)
    best: dict[int, Loads] = {0: ()}  # the loads of the best split of the first so many layers into the parts so far
    begins: list[dict[int, int]] = []  # for each part: where it begins, if it ends there
    for part, sums in enumerate(_prefix_sums(costs)):
        ends = range(part + 1, layers - partitions + part + 2)
        found = {end: _best_begin(sums, best, end) for end in ends}
        best = {end: loads for end, (loads, _) in found.items()}
        begins.append({end: begin for end, (_, begin) in found.items()})
    counts, end = [], layers
    for begin in reversed(begins):
        counts.append(end - begin[end])
        end = begin[end]
    return counts[::-1]


def _best_begin(sums: Sequence[int], best: dict[int, Loads], end: int) -> tuple[Loads, int]:
    """The best loads with a last part that ends at ``end``, and the latest place where that part can begin."""
    latest = min(max(best), end - 1)
    found: tuple[Loads, int] | None = None
    for begin in range(latest, min(best) - 1, -1):
        load = sums[end] - sums[begin]
        if found is not None and load > found[0][0]:
            break  # an earlier begin only adds to this part
        if found is not None and best[begin][:1] > found[0][:1]:
            continue
        loads = tuple(sorted((*best[begin], load), reverse=True))
        if found is None or loads < found[0]:
            found = loads, begin
    assert found is not None
    return found


def _prefix_sums(rows: Sequence[Sequence[float]]) -> list[list[int]]:
    """For each row, sums of the first 0, 1, ... costs, in the largest unit that makes all costs integers."""
    for costs in rows:
        for index, cost in enumerate(costs):
            if not math.isfinite(cost) or cost < 0:
                raise ValueError(f"costs must be finite and not negative, got {cost!r} for layer {index}")
    exact = [[Fraction(cost) for cost in costs] for costs in rows]
    unit = math.lcm(*(cost.denominator for costs in exact for cost in costs))
    return [list(accumulate((int(cost * unit) for cost in costs), initial=0)) for costs in exact]
