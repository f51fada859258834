"""Hop-delay patterns: how long a micro-batch rests on its way from stage to stage.

The way of a micro-batch consists of runs, from worker to next worker in one direction, and of corners, where the
direction changes, the worker stays the same, or the way goes from the last worker to the first. A pattern has one delay
for each run and each corner, forwards and backwards, and one at the loss. All micro-batches follow it, a period apart.
In a V placement these are the building blocks of arXiv 2405.15362, with free delays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

from pipework_synthesis.greedy import Policy
from pipework_synthesis.problem import Problem


def hop_classes(placement: Sequence[int]) -> list[int]:
    """The number of the run or corner that each boundary between stages belongs to.

    Example:
        >>> hop_classes((0, 1, 2, 2, 1, 0)), hop_classes((0, 1, 2, 0, 1, 2))
        ([0, 0, 1, 2, 2], [0, 0, 1, 2, 2])
    """
    classes: list[int] = []
    number, before = -1, None
    for one, other in itertools.pairwise(placement):
        step = other - one
        kind = step if abs(step) == 1 else None
        if kind is None or kind != before:
            number += 1
        classes.append(number)
        before = kind
    return classes


def offsets_of(problem: Problem, delays: Sequence[float]) -> list[float]:
    """The start of each lane's first operation, if the first micro-batch rests for the delays of its way.

    Args:
        problem: its times.
        delays: one for each run and corner forwards, one for the loss, and one for each backwards.
    """
    stages = problem.stages
    classes = hop_classes(problem.placement)
    corners = 1 + max(classes, default=-1)
    offsets = [0.0] * (3 * stages)
    time = 0.0
    for stage in range(1, stages):
        time += problem.times[0][stage - 1] + problem.hops[stage - 1] + delays[classes[stage - 1]]
        offsets[stage] = time
    time += problem.times[0][-1] + delays[corners]
    for stage in range(stages - 1, -1, -1):
        if stage < stages - 1:
            time += problem.times[1][stage + 1] + problem.hops[stage] + delays[corners + 1 + classes[stage]]
        offsets[stages + stage] = time
        offsets[2 * stages + stage] = time + problem.times[1][stage]
    return offsets


def random_delays(problem: Problem, random: Random) -> list[float]:
    """Delays from none to two operations."""
    unit = problem.work() / (len(problem.kinds) * max(map(len, problem.own())))
    count = 3 + 2 * max(hop_classes(problem.placement), default=-1)
    return [unit * random.choice((0.0, 0.0, 0.5, 1.0, 1.0, 2.0)) for _ in range(count)]


def random_policy(random: Random) -> Policy:
    """What workers do besides."""
    return Policy(
        turns=random.random() < 0.5,
        patience=random.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
        weights_first=random.random() < 0.5,
        planned_weights=random.random() < 0.3,
    )
