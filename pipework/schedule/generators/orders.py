"""Parts of orders that several schedules share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

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
