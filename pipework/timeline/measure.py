"""Costs out of measured timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from pipework.schedule import Action, Costs, Interval, Timeline
from pipework.schedule.edges import product

_Samples = dict[tuple[str, int], list[float]]


def measured_costs(lines: Sequence[Timeline], stages: int) -> Costs:
    """The median time of each kind of action on each stage, of each transfer, and the memory of a micro-batch.

    A transfer can be seen only where a worker waits for it: it is the time from the end of the action that sends to the
    start of the one that receives. Where nobody ever waited it costs 0, and nobody notices.

    Args:
        lines: measured, one step each, all of the same stages.
        stages: how many there are.

    Returns:
        Costs in the units of the timelines; 0 for what was never measured, a recompute then costs as a forward.

    Example:
        >>> from pipework.schedule import Action, Interval
        >>> line = Timeline((Interval(0, Action("F", 0, 0), 0.0, 2.0, held=64.0),), workers=1)
        >>> costs = measured_costs([line], stages=1)
        >>> costs.forward, costs.activation
        ((2.0,), (64.0,))
    """
    times: _Samples = defaultdict(list)
    memory: _Samples = defaultdict(list)
    for line in lines:
        checkpointed = {each.action[1:3] for each in line.intervals if each.action.kind == "R"}
        for interval in line.intervals:
            kind, stage, micro_batch, _ = interval.action
            times[kind, stage].append(interval.end - interval.start)
            if kind == "F":
                memory["message", stage].append(interval.sent)
            if kind in ("F", "R"):
                small = kind == "F" and (stage, micro_batch) in checkpointed
                memory["checkpoint" if small else "activation", stage].append(interval.held)
        for boundary, delay in _delays(line, stages):
            times["transfer", boundary].append(delay)
    forward, recompute = _typical(times, "F", stages), _typical(times, "R", stages)
    return Costs(
        forward=forward,
        backward=_typical(times, "B", stages),
        recompute=tuple(again or once for again, once in zip(recompute, forward, strict=True)),
        input_gradient=_typical(times, "I", stages),
        weight_gradient=_typical(times, "W", stages),
        transfer=_typical(times, "transfer", stages - 1),
        activation=_typical(memory, "activation", stages),
        checkpoint_activation=_typical(memory, "checkpoint", stages),
        message=_typical(memory, "message", stages - 1),
    )


def _typical(samples: _Samples, kind: str, stages: int) -> tuple[float, ...]:
    return tuple(median(samples.get((kind, stage), [0.0])) for stage in range(stages))


def _delays(line: Timeline, stages: int) -> Iterator[tuple[int, float]]:
    """Each boundary with the time that a value needed to cross it, wherever a worker had nothing else to do."""
    made: dict[Action, Interval] = {product(each.action): each for each in line.intervals}
    for row in line.by_worker:
        free = line.start
        for interval in row:
            kind, stage, micro_batch, _ = interval.action
            before = {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(kind, -1)
            source = made.get(product(Action(kind, before, micro_batch))) if 0 <= before < stages else None
            if source is not None and source.worker != interval.worker and source.end >= free:
                yield min(before, stage), max(0.0, interval.start - source.end)
            free = interval.end
