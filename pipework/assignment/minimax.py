"""The best split of a row of layers into consecutive parts, whose devices may differ.

A pipeline is as fast as its slowest stage, so the largest sum of a part is minimised. A program goes through the parts,
and for each place where a part can end it keeps the best split of all layers before::

    layers      | 3  1  1 | 1  3  1 | 2  2 |      part 1 may begin after one layer, two, ...; if it ends here ^,
    part             0    ^    1    ^   2         the best of those splits is extended by part 2

Costs are converted to integers first: sums of floats depend on their order, so equal sums could compare as different.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

Loads = tuple[int, ...]  # what splits are compared by; the first number is the largest load of a part


def check_partitions(partitions: int, layers: int) -> None:
    """Raises ``ValueError`` unless that many non-empty partitions can be made of that many layers."""
    if partitions < 1:
        raise ValueError(f"partitions must be at least 1, got {partitions}")
    if partitions > layers:
        raise ValueError(f"cannot make {partitions} partitions of {layers} layers: ask for at most {layers}")


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
    check_partitions(len(costs), max(map(len, costs), default=0))
    found = best_split(_prefix_sums(costs), lambda loads, load: tuple(sorted((*loads, load), reverse=True)))
    assert found is not None
    return found


def best_split(
    sums: Sequence[Sequence[int]],
    with_part: Callable[[Loads, int], Loads],
    share: Callable[[int, int, int], float] = lambda part, begin, end: 1.0,
    most: int | None = None,
) -> list[int] | None:
    """The split with the smallest share of a limit, and among those with the smallest loads.

    Args:
        sums: for each part, the costs of the layers before each place.
        with_part: the loads of some parts and of one more.
        share: of a limit that a part takes, at least 1, from the part's number, begin and end.
        most: no part costs more, if given.

    Returns:
        The number of layers of each part; None: there is no such split.
    """
    parts, layers = len(sums), len(sums[0]) - 1
    earliest = [layers]  # place at which each part can begin such that no later one costs too much
    for row in reversed(sums):
        earliest.append(0 if most is None else bisect_left(row, row[earliest[-1]] - most))
    earliest.reverse()
    best: dict[int, tuple[float, Loads]] = {0: (1.0, ())}
    begins: list[dict[int, int]] = []  # for each part: where it begins, if it ends there
    for part, row in enumerate(sums):
        first, last = min(best), max(best)
        longer: dict[int, tuple[float, Loads]] = {}
        begins.append({})
        for end in range(max(part + 1, earliest[part + 1]), layers - parts + part + 2):
            top: tuple[float, Loads] | None = None
            for begin in range(min(last, end - 1), first - 1, -1):
                load, over = row[end] - row[begin], share(part, begin, end)
                if (most is not None and load > most) or (top is not None and (over, load) > (top[0], top[1][0])):
                    break  # an earlier begin only adds to this part
                before = best.get(begin)
                if before is None or (top is not None and (before[0], before[1][:1]) > (top[0], top[1][:1])):
                    continue
                value = max(before[0], over), with_part(before[1], load)
                if top is None or value < top:
                    top, begins[-1][end] = value, begin
            if top is not None:
                longer[end] = top
        if not longer:
            return None
        best = longer
    counts, end = [], layers
    for places in reversed(begins):
        counts.append(end - places[end])
        end = places[end]
    return counts[::-1]


def _prefix_sums(rows: Sequence[Sequence[float]]) -> list[list[int]]:
    """For each row, sums of the first 0, 1, ... costs, in the largest unit that makes all costs integers."""
    for costs in rows:
        for index, cost in enumerate(costs):
            if not math.isfinite(cost) or cost < 0:
                raise ValueError(f"costs must be finite and not negative, got {cost!r} for layer {index}")
    exact = [[Fraction(cost) for cost in costs] for costs in rows]
    unit = math.lcm(*(cost.denominator for costs in exact for cost in costs))
    return [list(accumulate((int(cost * unit) for cost in costs), initial=0)) for costs in exact]
