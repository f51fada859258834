"""Costs from measured timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from pipework.schedule import Action, Costs, Interval, Timeline
from pipework.schedule.edges import product

_Samples = dict[tuple[str, int], list[float]]


def measured_costs(lines: Sequence[Timeline], stages: int) -> Costs:
    """The median times of each kind of action on each stage and of each transfer, and the memory of a micro-batch.

    A transfer is measured only if a worker waits for it: from the end of the action that makes the value to the start
    of the action that needs it. Transfers that no worker waits for cost 0; they do not affect the timeline.

    Args:
        lines: measured timelines of one step each, all with the same stages.
        stages: number of stages.

    Returns:
        Costs in the units of the timelines. Kinds that were not recorded on any stage are None, and :class:`Costs`
        derives them: half a backward for each half, both halves for a backward, a forward for a recompute. Single
        stages without a record get the same values. Without any backward, backwards cost 0.

    Example:
        >>> from pipework.schedule import Action, Interval
        >>> line = Timeline((Interval(0, Action("F", 0, 0), 0.0, 2.0, held=64.0),), workers=1)
        >>> costs = measured_costs([line], stages=1)
        >>> costs.forward, costs.activation
        ((2.0,), (64.0,))
        >>> print(costs.recompute)
        None
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
            if kind == "I":
                memory["waiting", stage].append(interval.held)
        for boundary, delay in _delays(line, stages):
            times["transfer", boundary].append(delay)
    forward = _typical(times, "F", stages)
    half = tuple(both / 2 for both in _typical(times, "B", stages))
    inputs, weights = _typical(times, "I", stages, half), _typical(times, "W", stages, half)
    halves = tuple(map(sum, zip(inputs, weights, strict=True)))
    activation = _typical(memory, "activation", stages)
    recorded = {kind for kind, _ in times}
    split = bool(recorded & {"I", "W"})
    return Costs(
        forward=forward,
        # Without any recorded backward the cost is 0, and not the default of Costs.
        backward=_typical(times, "B", stages, halves) if "B" in recorded or not split else None,
        recompute=_typical(times, "R", stages, forward) if "R" in recorded else None,
        input_gradient=inputs if split else None,
        weight_gradient=weights if split else None,
        transfer=_typical(times, "transfer", stages - 1),
        activation=activation,
        checkpoint_activation=_typical(memory, "checkpoint", stages),
        waiting=_typical(memory, "waiting", stages, activation) if "I" in recorded else None,
        message=_typical(memory, "message", stages - 1),
    )


def _typical(samples: _Samples, kind: str, stages: int, otherwise: Sequence[float] = ()) -> tuple[float, ...]:
    """The medians; for stages without a sample, the values of `otherwise`, or 0."""
    missing = otherwise or (0.0,) * stages
    return tuple(median(samples.get((kind, stage), [missing[stage]])) for stage in range(stages))


def _delays(line: Timeline, stages: int) -> Iterator[tuple[int, float]]:
    """Boundaries with the time of a transfer, for each transfer that an idle worker waited for."""
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
