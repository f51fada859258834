"""The best split of a row of layers into consecutive parts whose devices differ.

A layer has another cost on each device, and the order of the devices is given. The shortcuts of `minimax` do not hold,
since a part that ends later may force a slow device to take an expensive layer. This is the plain dynamic programme
over (part, end). It is fast enough for a thousand layers.
"""

from collections.abc import Sequence

from pipework.assignment.checks import check_partitions
from pipework.assignment.minimax import Loads, prefix_sums, walked_back


def minimax_on_devices(costs: Sequence[Sequence[float]]) -> list[int]:
    """Splits consecutive layers into non-empty partitions whose largest cost is as small as possible.

    Among all such splits the second-largest cost is minimal too, then the third, and so on. The result is exact.

    Args:
        costs: For each partition, the cost of each layer on its device: finite and not negative, in one unit.

    Returns:
        The number of layers of each partition.

    Raises:
        ValueError: There are more partitions than layers, rows of different lengths, or a cost is out of range.

    Example:
        >>> fast, slow = [1, 1, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5]
        >>> minimax_on_devices([fast, slow])
        [5, 1]
    """
    lengths = {len(row) for row in costs}
    if len(lengths) > 1:
        raise ValueError(f"each partition's device must have a cost for each layer, got rows of {sorted(lengths)}")
    partitions, layers = len(costs), max(lengths, default=0)
    check_partitions(partitions, layers)
    best: dict[int, Loads] = {0: ()}  # the loads of the best split of the first so many layers into the parts so far
    begins: list[dict[int, int]] = []  # for each part: where it begins, if it ends there
    for part, sums in enumerate(prefix_sums(costs)):
        longer: dict[int, Loads] = {}
        begins.append({})
        lowest, highest = min(best), max(best)
        for end in range(part + 1, layers - partitions + part + 2):
            longer[end], begins[-1][end] = _begin(sums, best, lowest, highest, end)
        best = longer
    return walked_back(begins, layers)


def _begin(sums: Sequence[int], best: dict[int, Loads], lowest: int, highest: int, end: int) -> tuple[Loads, int]:
    """The best loads with a last part that ends at ``end``, and the latest place where that part can begin."""
    found: Loads | None = None
    begin = end
    for start in range(min(highest, end - 1), lowest - 1, -1):
        load = sums[end] - sums[start]
        if found is not None and load > found[0]:
            break  # an earlier start only adds to this part
        if found is not None and best[start][:1] > found[:1]:
            continue
        loads = tuple(sorted((*best[start], load), reverse=True))
        if found is None or loads < found:
            found, begin = loads, start
    assert found is not None
    return found, begin
