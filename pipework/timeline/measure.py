"""Costs out of measured timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from pipework.schedule import Costs, Timeline

_Samples = dict[tuple[str, int], list[float]]


def measured_costs(lines: Sequence[Timeline], stages: int) -> Costs:
    """The median time of each kind of action on each stage, and the memory that a micro-batch holds there.

    A micro-batch's memory is what its worker holds more after its forward (if checkpointed, after its recompute) than
    after the action before.

    Args:
        lines: measured, all of the same stages.
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
    for line in lines:
        _collect(line, times, memory)

    def typical(samples: _Samples, kind: str) -> tuple[float, ...]:
        return tuple(median(samples.get((kind, stage), [0.0])) for stage in range(stages))

    forward, recompute = typical(times, "F"), typical(times, "R")
    return Costs(
        forward=forward,
        backward=typical(times, "B"),
        recompute=tuple(again or once for again, once in zip(recompute, forward, strict=True)),
        input_gradient=typical(times, "I"),
        weight_gradient=typical(times, "W"),
        activation=typical(memory, "held"),
        checkpoint_activation=typical(memory, "checkpoint"),
    )


def _collect(line: Timeline, times: _Samples, memory: _Samples) -> None:
    checkpointed = {
        (each.step, each.action.stage, each.action.micro_batch) for each in line.intervals if each.action.kind == "R"
    }
    for row in line.by_worker:
        before = 0.0
        kept: dict[tuple[int, int, int], float] = {}
        for interval in row:
            kind, stage, micro_batch = interval.action
            key = (interval.step, stage, micro_batch)
            times[kind, stage].append(interval.end - interval.start)
            grown = max(0.0, interval.memory - before)
            before = interval.memory
            if kind == "F" and key in checkpointed:
                kept[key] = grown
                memory["checkpoint", stage].append(grown)
            elif kind in ("F", "R"):
                # What a checkpoint kept is part of what its recomputation holds.
                memory["held", stage].append(grown + kept.get(key, 0.0))
