"""Memory of the workers' activations and gathered weights, which depends on the orders and not on times."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf
from typing import Final

from pipework.schedule.action import Action
from pipework.schedule.costs import StageCosts
from pipework.schedule.schedule import Schedule

SLACK: Final = 1 + 1e-9
"""The factor by which an amount may exceed a limit, for rounding."""


def stage_peaks(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """The peak memory of each stage."""
    own: list[list[Action]] = [[] for _ in schedule.placement]
    for order in schedule.orders:
        for action in order:
            own[action[1]].append(action)
    return tuple(max(amounts(schedule, each, costs)[0], default=0.0) for each in own)


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


def amounts(schedule: Schedule, order: Sequence[Action], costs: StageCosts) -> tuple[array[float], array[float]]:
    """The memory of a worker's actions.

    Args:
        schedule: a schedule that can be executed.
        order: of one worker, or the actions of one stage in order.
        costs: the memory of each stage.

    Returns:
        For each action the peak during it, and the memory of its micro-batch on its stage after it.

    Example:
        >>> from pipework.schedule import Costs, fill_drain
        >>> schedule = fill_drain(1, 2)
        >>> [list(each) for each in amounts(schedule, schedule.orders[0], Costs().spread(1))]
        [[1.0, 2.0, 2.0, 1.0], [1.0, 1.0, 0.0, 0.0]]
    """
    # The memory of each micro-batch on each stage; 0 if there is none.
    of_stage = {stage: [0.0] * schedule.micro_batches for stage in {action[1] for action in order}}
    checkpointed = {action[1:3] for action in order if action[0] == "R"} if "R" in schedule.kinds else ()
    inference = schedule.inference
    activation, small, waiting = costs.activation, costs.checkpoint_activation, costs.waiting
    total, count = 0.0, 0  # of micro-batches that hold memory
    whole = 0.0  # of stages whose weights are gathered
    row, after_each = array("d"), array("d")
    add_most, add_held = row.append, after_each.append
    for kind, stage, micro_batch, _ in order:
        held = of_stage[stage]
        most = total
        after = 0.0
        if kind == "F":
            after = activation[stage]
            most = total + after
            if (stage, micro_batch) in checkpointed:
                # A checkpointed forward holds its graph until it ends.
                after = small[stage]
                most = total + max(after, activation[stage])
            if inference:  # frees activations after each forward
                after = 0.0
            else:
                total += after
                count += 1
                held[micro_batch] = after
        elif kind == "I":  # the weight half needs fewer activations, but also the gradients of outputs
            after, before = waiting[stage], held[micro_batch]
            most += max(0.0, after - before)
            total += after - before
            held[micro_batch] = after
        elif kind in ("W", "B"):
            count -= 1
            # Removes the rounding error when nothing is held.
            total = total - held[micro_batch] if count else 0.0
            held[micro_batch] = 0.0
        elif kind == "R":
            after, before = activation[stage], held[micro_batch]
            most = total - before + after
            total += after - before
            held[micro_batch] = after
        elif micro_batch >= 0:
            after = held[micro_batch]
        elif kind == "UNSHARD":
            whole += costs.weights[stage]
        add_most(most + whole)
        if kind == "RESHARD":
            whole -= costs.weights[stage]
        add_held(after)
    return row, after_each
