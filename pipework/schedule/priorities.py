"""Priorities of workers, for list scheduling: from a list of steps, or from one pattern for all micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Literal, NamedTuple

from pipework.schedule.action import KINDS, NONE, Action, make_action


def numbered(
    steps: Iterable[tuple[str, int]], micro_batches: int, numbers: Sequence[int] | None = None
) -> list[Action]:
    """Number the steps of each kind and stage with the micro-batches 0, 1, 2, .., and drop the surplus.

    Args:
        steps: kind and stage of each action; ``B`` and ``I`` of a stage are counted together.
        micro_batches: number of micro-batches.
        numbers: these numbers as objects, which the actions of several calls shall share, for they may be millions.

    Example:
        >>> [str(action) for action in numbered([("F", 0), ("F", 1)] + 2 * [("F", 0), ("I", 0), ("B", 0)], 2)]
        ['0F0', '1F0', '0F1', '0I0', '0B1']
    """
    counts: dict[tuple[str, int], Iterator[int]] = {}
    numbers = list(range(micro_batches)) if numbers is None else numbers
    actions = []
    for step in steps:
        count = counts.get(step)
        if count is None:
            kind, stage = step
            count = iter(numbers)
            for other in [each for each in KINDS if (each == "F") == (kind == "F")]:
                counts[other, stage] = count
        micro_batch = next(count, None)
        if micro_batch is not None:
            actions.append(make_action((*step, micro_batch, NONE)))
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
    numbers = list(range(micro_batches))  # shared by all, for their number may be millions
    lanes: list[list[tuple[int, str, int]]] = [[] for _ in range(workers)]
    for start, kind, stage in starts:
        lanes[min(stage, last - stage)].append((start, kind, stage))
    return [list(_in_order_of_time(each, numbers)) for each in lanes]


def _in_order_of_time(lanes: Iterable[tuple[int, str, int]], numbers: Sequence[int]) -> Iterator[Action]:
    """The actions of lanes (first start, kind, stage), six units apart, ordered by start, kind and stage."""
    ordered = sorted(lanes, key=itemgetter(1, 2))
    count = len(ordered)
    actions = [
        map(make_action, zip(repeat(kind), repeat(stage), numbers, repeat(NONE), strict=False))
        for _, kind, stage in ordered
    ]
    # Numbers that sort like (start, kind, stage), and of which the remainder tells the lane.
    keys = [
        range(count * start + lane, count * (start + 6 * len(numbers)) + lane, 6 * count)
        for lane, (start, _, _) in enumerate(ordered)
    ]
    for key in sorted(chain.from_iterable(keys)):
        yield next(actions[key % count])
