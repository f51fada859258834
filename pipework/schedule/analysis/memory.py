"""Memory of the workers' activations and gathered weights, which depends on the orders and not on times."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf
from typing import Final

from pipework.schedule.action import Action
from pipework.schedule.costs import StageCosts
from pipework.schedule.edges import awaited
from pipework.schedule.kinds import ActionKind
from pipework.schedule.schedule import Schedule

SLACK: Final = 1 + 1e-9
"""The factor by which an amount may exceed a limit, for rounding."""


def stage_peaks(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """The peak memory of each stage."""
    own: list[list[Action]] = [[] for _ in schedule.placement]
    for order in schedule.orders:
        for action in _as_freed(schedule, order)[0]:
            own[action[1]].append(action)
    return tuple(max(_amounts(schedule, each, costs)[0], default=0.0) for each in own)


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
        order: of one worker.
        costs: the memory of each stage.

    Returns:
        For each action the peak during it, and the memory of its micro-batch on its stage after it.

    Example:
        >>> from pipework.schedule import Costs, fill_drain
        >>> schedule = fill_drain(1, 2)
        >>> [list(each) for each in amounts(schedule, schedule.orders[0], Costs().spread(1))]
        [[1.0, 2.0, 2.0, 1.0], [1.0, 1.0, 0.0, 0.0]]
    """
    actions, added = _as_freed(schedule, order)
    row, after_each = _amounts(schedule, actions, costs)
    for position in reversed(added):
        del row[position], after_each[position]
    return row, after_each


def _as_freed(schedule: Schedule, order: Sequence[Action]) -> tuple[Sequence[Action], Sequence[int]]:
    """The actions of a worker in the order in which they take and free memory.

    An ``O`` frees it where its worker waits for its end.

    Returns:
        The actions, and the positions of those that have been added: where an ``O`` was there is one without effect.
    """
    if schedule.kinds.isdisjoint(leaving := schedule.table.letters(scope="copy", phase="forward")):
        return order, ()
    waits = awaited(order, schedule.table)
    actions: list[Action] = []
    added: list[int] = []
    for position, action in enumerate(order):
        if position in waits:
            added.append(len(actions))
            actions.append(order[waits[position]])
        actions.append(action._replace(kind="") if action[0] in leaving else action)
    return actions, added


def _amounts(schedule: Schedule, order: Sequence[Action], costs: StageCosts) -> tuple[array[float], array[float]]:
    """The same for actions that take and free memory in this order."""
    stages = {action[1] for action in order}
    # The memory of each micro-batch on each stage, and last of the stage's weights while they are gathered.
    of_stage = {stage: [0.0] * (schedule.micro_batches + 1) for stage in stages}
    effects = {
        kind: {stage: _effect(schedule.table[kind], stage, costs, inference=schedule.inference) for stage in stages}
        for kind in schedule.kinds
    }
    effects[""] = dict.fromkeys(stages, (0.0, 0.0, None))
    # What forwards leave that are computed again.
    leaves = {kind: costs[row.leaves] for kind, row in schedule.table.items() if row.leaves and kind in effects}
    left = {action[1:3]: leaves[action[0]][action[1]] for action in order if action[0] in leaves} if leaves else {}
    copies = schedule.table.letters(scope="copy") if left else ()
    leaving = schedule.table.letters(scope="copy", phase="forward") if left else ()
    total, count = 0.0, 0  # of micro-batches, and stages, that hold memory
    row, after_each = array("d"), array("d")
    add_most, add_held = row.append, after_each.append
    for kind, stage, micro_batch, _ in order:
        held = of_stage[stage]
        during, after, step = effects[kind][stage]
        before = held[micro_batch]
        if step is None:
            add_most(total)
            add_held(before)
            continue
        if kind in leaving and (stage, micro_batch) in left:
            after = during = costs["checkpoint_offloaded"][stage]
        elif left and (step == 1 or kind in copies):
            inputs = left.get((stage, micro_batch), after)
            if kind in copies:
                after = during = min(after, inputs)
            else:
                after, during = inputs, max(inputs, during)
        add_most(total + (during - before) if during > before else total)
        add_held(after)
        held[micro_batch] = after
        count += step
        # Removes the rounding error when nothing is held.
        total = total + (after - before) if count else 0.0
    return row, after_each


def _effect(kind: ActionKind, stage: int, costs: StageCosts, *, inference: bool) -> tuple[float, float, int | None]:
    """The memory during an action, and after it; and by how much the number of holders of memory grows.

    Returns:
        None instead of the number for an action that leaves the memory as it is.
    """
    if not kind.holds:
        return 0.0, 0.0, None if kind.holds is None else -1
    size = costs[kind.holds][stage]
    if inference and kind.scope == "micro-batch":  # a forward frees its activations
        return size, 0.0, 0
    return size, size, 0 if kind.needs else 1
