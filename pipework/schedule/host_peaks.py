"""The bytes of host memory that activations take while they are away from their devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from pipework.schedule.edges import recomputed
from pipework.schedule.schedule import Schedule


def host_peaks(schedule: Schedule, graphs: Sequence[Sequence[int]], inputs: Sequence[Sequence[int]]) -> list[int]:
    """The most that each worker has in host memory, in buffers that serve again for other micro-batches.

    A micro-batch has its buffers from its ``O`` to the action before which its ``L`` must have ended. A worker keeps as
    many buffers of each size as are in use at once.

    Args:
        schedule: with or without ``O``.
        graphs: for each stage, the sizes of the buffers that a micro-batch needs.
        inputs: the same for a micro-batch that is recomputed, whose input is what goes.

    Example:
        >>> from pipework.schedule import build, with_offload
        >>> schedule = with_offload(build("1f1b", workers=3, chunks=3))
        >>> host_peaks(schedule, [[64, 8]] * 3, [[8]] * 3)
        [144, 0, 0]
    """
    table, again = schedule.table, recomputed(schedule)
    leaving = table.letters(scope="copy", phase="forward")
    before = {*chain.from_iterable(table[kind].before for kind in table.letters(scope="copy"))}
    peaks = []
    for order in schedule.orders:
        in_use: Counter[int] = Counter()
        most: Counter[int] = Counter()
        away: set[tuple[int, int]] = set()
        for action in order:
            micro_batch = action[1:3]
            sizes = (inputs if micro_batch in again else graphs)[action[1]]
            if action[0] in leaving:
                in_use.update(sizes)
                away.add(micro_batch)
                most |= in_use
            elif action[0] in before and micro_batch in away:
                in_use.subtract(sizes)
                away.remove(micro_batch)
        peaks.append(sum(size * count for size, count in most.items()))
    return peaks
