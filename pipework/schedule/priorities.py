"""Priorities of workers, for list scheduling: from a list of steps, or from one pattern for all micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from pipework.schedule.action import Action


def numbered(steps: Iterable[tuple[str, int]], micro_batches: int) -> list[Action]:
    """Number the steps of each kind and stage with the micro-batches 0, 1, 2, .., and drop the surplus.

    Args:
        steps: kind and stage of each action; ``B`` and ``I`` of a stage are counted together.
        micro_batches: number of micro-batches.

    Example:
        >>> [str(action) for action in numbered([("F", 0), ("F", 1)] + 2 * [("F", 0), ("I", 0), ("B", 0)], 2)]
        ['0F0', '1F0', '0F1', '0I0', '0B1']
    """
    count: Counter[tuple[bool, int]] = Counter()
    actions = []
    for kind, stage in steps:
        lane = (kind == "F", stage)
        if count[lane] < micro_batches:
            actions.append(Action(kind, stage, count[lane]))
            count[lane] += 1
    return actions


class Hops(NamedTuple):
    r"""The time from the start of one action of a micro-batch to the start of the next, in a V placement.

    ::

        worker 0      F                 F I                 I
                       \ down       up / loss\ back    home /
        worker p - 1     F - turn - F          I - again - I

    Attributes:
        down: between forwards, from worker 0 to the last one.
        turn: between the two forwards on the last worker.
        up: between forwards, from the last worker to worker 0.
        loss: from the last forward to the first backward, both on worker 0.
        back: between backwards, from worker 0 to the last one.
        again: between the two backwards on the last worker.
        home: between backwards, from the last worker to worker 0.
    """

    down: int = 1
    turn: int = 1
    up: int = 1
    loss: int = 1
    back: int = 1
    again: int = 1
    home: int = 1


def v_pattern(workers: int, micro_batches: int, hops: Hops, *, backward: Literal["B", "I"] = "I") -> list[list[Action]]:
    """The priorities of each worker if all micro-batches follow one pattern, six units apart.

    Six units are the work of a worker on a micro-batch: on each of two stages, a forward of one and a backward of two.

    Args:
        workers: number of workers, each with two stages in V placement.
        micro_batches: number of micro-batches.
        hops: the pattern.
        backward: ``"B"`` for whole backwards, ``"I"`` for split ones.

    Example:
        >>> [str(action) for action in v_pattern(2, 2, Hops())[1]]
        ['1F0', '2F0', '2I0', '1I0', '1F1', '2F1', '2I1', '1I1']
    """
    last = 2 * workers - 1
    pace = [
        *[("F", stage, hops.down if stage < workers else hops.up) for stage in range(1, last + 1)],
        *[(backward, stage, hops.back if stage >= workers else hops.home) for stage in range(last, -1, -1)],
    ]
    corners = {("F", workers): hops.turn, (backward, last): hops.loss, (backward, workers - 1): hops.again}
    starts = [(0, "F", 0)]
    for kind, stage, hop in pace:
        starts.append((starts[-1][0] + corners.get((kind, stage), hop), kind, stage))
    priorities: list[list[tuple[int, Action]]] = [[] for _ in range(workers)]
    for start, kind, stage in starts:
        of_all = [(start + 6 * micro_batch, Action(kind, stage, micro_batch)) for micro_batch in range(micro_batches)]
        priorities[min(stage, last - stage)].extend(of_all)
    return [[action for _, action in sorted(each)] for each in priorities]
