"""Parts of orders that several schedules share: warm-ups, rounds, numbered steps, and patterns of a V placement."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

from pipework.schedule.action import Action


def warm_up_then_alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Run `warm_up` forwards, then one forward and one backward in turn, then the remaining backwards.

    Example:
        >>> forwards, backwards = ([Action(kind, 0, i) for i in range(3)] for kind in "FB")
        >>> [str(action) for action in warm_up_then_alternate(forwards, backwards, 1)]
        ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    turns = itertools.chain.from_iterable(zip(forwards[warm_up:], backwards[:steady], strict=True))
    return (*forwards[:warm_up], *turns, *backwards[steady:])


def nearly_equal_rounds(micro_batches: int, count: int) -> list[range]:
    """Divide the micro-batches into `count` consecutive ranges whose lengths differ by at most one.

    The longer ones come first: the first round decides the length of the warm-up, and no later one may need more.

    Example:
        >>> nearly_equal_rounds(5, 2)
        [range(0, 3), range(3, 5)]
    """
    least, more = divmod(micro_batches, count)
    starts = [number * least + min(number, more) for number in range(count + 1)]
    return list(itertools.starmap(range, itertools.pairwise(starts)))


def in_rounds(kind: str, stages: Iterable[int], rounds: Iterable[range]) -> list[Action]:
    """The actions of one kind, round by round, and in each round stage by stage.

    Example:
        >>> [str(action) for action in in_rounds("F", [0, 2], [range(0, 2), range(2, 3)])]
        ['0F0', '0F1', '2F0', '2F1', '0F2', '2F2']
    """
    return [Action(kind, stage, micro_batch) for part in rounds for stage in stages for micro_batch in part]


def numbered(steps: Iterable[tuple[str, int]], micro_batches: int) -> list[Action]:
    """Number the steps of each kind and stage with the micro-batches 0, 1, 2, .., and drop the surplus.

    Args:
        steps: kind and stage of each action; ``B`` and ``I`` of a stage are counted together.
        micro_batches: number of micro-batches.

    Example:
        >>> [str(action) for action in numbered([("F", 0), ("F", 1)] + 2 * [("F", 0), ("I", 0), ("B", 0)], 2)]
        ['0F0', '1F0', '0F1', '0I0', '0B1']
    """
    counts: dict[tuple[bool, int], int] = defaultdict(int)
    actions = []
    for kind, stage in steps:
        micro_batch = counts[kind == "F", stage]
        counts[kind == "F", stage] += 1
        if micro_batch < micro_batches:
            actions.append(Action(kind, stage, micro_batch))
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
    lanes: list[list[tuple[int, str, int, int]]] = [[] for _ in range(workers)]
    for start, kind, stage in starts:
        lanes[min(stage, last - stage)] += [(start + 6 * i, kind, stage, i) for i in range(micro_batches)]
    return [[Action(kind, stage, i) for _, kind, stage, i in sorted(lane)] for lane in lanes]
