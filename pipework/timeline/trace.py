"""A timeline as a trace, in the JSON that Perfetto and chrome://tracing read.

One process for each worker with a track "compute", arrows from each forward to the next stage's and from each backward
to the previous stage's, and a counter of memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pipework.schedule import Interval, Timeline

Event = dict[str, Any]

_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recompute"}


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace of a timeline, as the object that its JSON describes.

    Args:
        timeline: in seconds, or in units of cost, of which one is then shown as a millisecond.

    Returns:
        ``{"traceEvents": [...], "displayTimeUnit": "ms"}``, times in microseconds.

    Example:
        >>> from pipework.schedule import fill_drain, simulate
        >>> events = trace(simulate(fill_drain(2, 1)).timeline)["traceEvents"]
        >>> [event["name"] for event in events if event["ph"] == "X"]
        ['0F0', '0B0', '1F0', '1B0']
    """
    scale = 1e6 if timeline.unit == "s" else 1e3
    events = [*_names(timeline), *_slices(timeline, scale), *_flows(timeline, scale)]
    if timeline.knows_memory:
        events.extend(_memory(timeline, scale))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def trace_json(timeline: Timeline) -> str:
    """The trace of a timeline as JSON text; see :func:`trace`.

    Example:
        >>> from pipework.schedule import fill_drain, simulate
        >>> trace_json(simulate(fill_drain(1, 1)).timeline)[:16]
        '{"traceEvents": '
    """
    return json.dumps(trace(timeline), allow_nan=False)


def _names(timeline: Timeline) -> Iterator[Event]:
    for worker in range(timeline.workers):
        yield _event("M", "process_name", worker, args={"name": f"worker {worker}"})
        yield _event("M", "process_sort_index", worker, args={"sort_index": worker})
        yield _event("M", "thread_name", worker, args={"name": "compute"})


def _slices(timeline: Timeline, scale: float) -> Iterator[Event]:
    for row in timeline.by_worker:
        for interval in row:
            kind, stage, micro_batch, _ = interval.action
            yield _event(
                "X",
                str(interval.action),
                interval.worker,
                cat=_KINDS[kind],
                ts=interval.start * scale,
                dur=(interval.end - interval.start) * scale,
                args={"stage": stage, "micro-batch": micro_batch, "step": interval.step},
            )


def _flows(timeline: Timeline, scale: float) -> Iterator[Event]:
    """An arrow for each value and each gradient that goes from one stage to another."""
    made: dict[tuple[int, str, int, int], Interval] = {}
    for interval in timeline.intervals:
        kind, stage, micro_batch, _ = interval.action
        if kind in ("F", "B", "I"):
            made[interval.step, "F" if kind == "F" else "B", stage, micro_batch] = interval
    number = 0
    for (step, direction, stage, micro_batch), source in made.items():
        target = made.get((step, direction, stage + (1 if direction == "F" else -1), micro_batch))
        if target is None:
            continue
        name = "value" if direction == "F" else "gradient"
        # A flow belongs to the slice that it is in: its middle leaves no doubt, even if the next follows at once.
        middle = (source.start + source.end) / 2 * scale
        yield _event("s", name, source.worker, cat="transfer", id=number, ts=middle)
        middle = (target.start + target.end) / 2 * scale
        yield _event("f", name, target.worker, cat="transfer", id=number, ts=middle, bp="e")
        number += 1


def _memory(timeline: Timeline, scale: float) -> Iterator[Event]:
    name = "memory (bytes)" if timeline.memory_unit == "bytes" else "memory"
    for worker, row in enumerate(timeline.by_worker):
        for interval, behind in zip(row, timeline.idle_memory(worker), strict=True):
            yield _event("C", name, worker, ts=interval.start * scale, args={"held": interval.memory})
            if behind != interval.memory:
                yield _event("C", name, worker, ts=interval.end * scale, args={"held": behind})


def _event(phase: str, name: str, worker: int, **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": worker, "tid": 0, **more}
