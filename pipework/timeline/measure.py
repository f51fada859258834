"""Costs out of measured timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from pipework.schedule import Costs, Interval, Timeline

_Samples = dict[tuple[str, int], list[float]]


def measured_costs(lines: Sequence[Timeline], stages: int) -> Costs:
    """The median time of each kind of action on each stage, and the memory that a micro-batch holds there.

    A micro-batch's memory is what its worker holds in its forward (if checkpointed, in its recompute) beyond what it
    holds for the others.

    Args:
        lines: measured, one step each, all of the same stages.
        stages: how many there are.

    Returns:
        Costs in the units of the timelines; 0 for what was never measured, a recompute then costs as a forward.

    Example:
        >>> from pipework.schedule import Action, Interval
        >>> line = Timeline((Interval(0, Action("F", 0, 0), 0.0, 2.0, memory=64.0),), workers=1)
        >>> costs = measured_costs([line], stages=1)
        >>> costs.forward, costs.activation
        ((2.0,), (64.0,))
    """
    times: _Samples = defaultdict(list)
    memory: _Samples = defaultdict(list)
    rows = [row for line in lines for row in line.by_worker]
    for row in rows:
        for interval in row:
            times[interval.action.kind, interval.action.stage].append(interval.end - interval.start)
        _collect_checkpoints(row, memory)
    checkpoint = _typical(memory, "checkpoint", stages)
    for row in rows:
        _collect_activations(row, checkpoint, memory)
    forward, recompute = _typical(times, "F", stages), _typical(times, "R", stages)
    return Costs(
        forward=forward,
        backward=_typical(times, "B", stages),
        recompute=tuple(again or once for again, once in zip(recompute, forward, strict=True)),
        input_gradient=_typical(times, "I", stages),
        weight_gradient=_typical(times, "W", stages),
        activation=_typical(memory, "activation", stages),
        checkpoint_activation=checkpoint,
    )


def _typical(samples: _Samples, kind: str, stages: int) -> tuple[float, ...]:
    return tuple(median(samples.get((kind, stage), [0.0])) for stage in range(stages))


def _checkpointed(row: Sequence[Interval]) -> set[tuple[int, int]]:
    return {each.action[1:] for each in row if each.action.kind == "R"}


def _collect_checkpoints(row: Sequence[Interval], memory: _Samples) -> None:
    """What a checkpoint keeps, as the growth from one forward to the next.

    Not the forward's own memory: a first pass may hold more while it runs than it keeps.
    """
    checkpointed = _checkpointed(row)
    for before, after in pairwise(row):
        (kind, stage, micro_batch), following = before.action, after.action
        if (kind, stage) != ("F", following.stage) or following.kind != "F" or (stage, micro_batch) not in checkpointed:
            continue
        if following[1:] in checkpointed:
            memory["checkpoint", stage].append(max(0.0, after.memory - before.memory))
        elif before is row[0] and row[-1].action.stage == stage:
            # The row's only checkpoint; its last backward holds the activations of one micro-batch and nothing else.
            memory["checkpoint", stage].append(max(0.0, after.memory - row[-1].memory))


def _collect_activations(row: Sequence[Interval], checkpoint: Sequence[float], memory: _Samples) -> None:
    checkpointed = _checkpointed(row)
    held: dict[tuple[int, int], float] = {}
    for interval in row:
        kind, stage, micro_batch = interval.action
        key = (stage, micro_batch)
        if kind == "F" and key in checkpointed:
            held[key] = checkpoint[stage]
        elif kind in ("F", "R"):
            held.pop(key, None)
            held[key] = max(0.0, interval.memory - sum(held.values()))
            memory["activation", stage].append(held[key])
        elif kind in ("B", "W"):
            held.pop(key, None)
