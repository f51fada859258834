"""Memory of the workers' activations, which depends on the orders and not on times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from math import inf
from typing import Final

from pipework.schedule.action import Action
from pipework.schedule.costs import StageCosts
from pipework.schedule.edges import recomputed
from pipework.schedule.schedule import Schedule

SLACK: Final = 1 + 1e-9
"""The factor by which an amount may exceed a limit, for rounding."""

Row = list[tuple[float, float]]
"""For each action of an order: the worker's peak during it, and the memory of its micro-batch on its stage after it."""


def rows(schedule: Schedule, costs: StageCosts) -> list[Row]:
    """The memory of each worker during and after each of its actions.

    Example:
        >>> from pipework.schedule import Costs, fill_drain
        >>> rows(fill_drain(1, 2), Costs().spread(1))[0]
        [(1.0, 1.0), (2.0, 1.0), (2.0, 0.0), (1.0, 0.0)]
    """
    checkpointed = recomputed(schedule)
    return [_row(order, costs, checkpointed, inference=schedule.inference) for order in schedule.orders]


def stage_peaks(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """The peak memory of each stage."""
    own: list[list[Action]] = [[] for _ in schedule.placement]
    for order in schedule.orders:
        for action in order:
            own[action.stage].append(action)
    checkpointed = recomputed(schedule)
    held = (_row(order, costs, checkpointed, inference=schedule.inference) for order in own)
    return tuple(max((most for most, _ in each), default=0.0) for each in held)


def each_limit(memory_limit: float | Sequence[float] | None, workers: int) -> tuple[float, ...]:
    """The memory limit of each worker.

    Args:
        memory_limit: one number for all workers, or a number for each; None: infinity.
        workers: number of workers.

    Raises:
        TypeError: a limit is no number.
        ValueError: a limit is negative or NaN, or the sequence has another length.

    Example:
        >>> each_limit(4, 2)
        (4.0, 4.0)
    """
    if memory_limit is None:
        return (inf,) * workers
    if not isinstance(memory_limit, Sequence) or isinstance(memory_limit, str):
        memory_limit = (memory_limit,) * workers
    limits = tuple(memory_limit)
    if len(limits) != workers:
        raise ValueError(
            f"memory_limit has {len(limits)} number{'s' if len(limits) != 1 else ''}: wanted {workers}, "
            "one for each worker, or a single number for all"
        )
    for worker, limit in enumerate(limits):
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise TypeError(f"memory_limit of worker {worker} is {limit!r}: wanted a number, or None for no limit")
        if not limit >= 0:  # also refuses NaN
            raise ValueError(
                f"memory_limit of worker {worker} is {limit!r}: wanted a number of at least 0, or None for no limit"
            )
    return tuple(map(float, limits))


def exceeds(amount: float, limit: float) -> bool:
    """Whether an amount of memory is above a limit, with a tolerance because peaks are rounded sums.

    Example:
        >>> exceeds(0.1 + 0.2, 0.3), exceeds(0.31, 0.3)
        (False, True)
    """
    return amount > limit * SLACK


def _row(order: Iterable[Action], costs: StageCosts, checkpointed: Set[tuple[int, int]], *, inference: bool) -> Row:
    held: dict[tuple[int, int], float] = {}
    activation, small, waiting = costs.activation, costs.checkpoint_activation, costs.waiting
    total = 0.0
    row: Row = []
    for kind, stage, micro_batch, _ in order:
        key = (stage, micro_batch)
        most = total
        if kind in ("F", "R"):
            before = held.get(key, 0.0)
            after = small[stage] if kind == "F" and key in checkpointed else activation[stage]
            held[key] = after
            # A checkpointed forward holds its graph until it ends.
            most = total - before + max(after, activation[stage])
            total += after - before
        if kind == "I":  # the weight half needs fewer activations, but also the gradients of outputs
            most += max(0.0, waiting[stage] - held[key])
            total += waiting[stage] - held[key]
            held[key] = waiting[stage]
        if kind in ("B", "W") or (inference and kind == "F"):  # inference frees activations after each forward
            total -= held.pop(key)
            # Removes the rounding error when nothing is held.
            total = total if held else 0.0
        row.append((most, held.get(key, 0.0)))
    return row
