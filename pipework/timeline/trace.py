"""A timeline as a trace, in the JSON format of Perfetto and chrome://tracing.

Each worker is a process with a track "compute" and, if communication is known, "send", "receive" and "reduce". Arrows
show the values and gradients that go from stage to stage, and a counter shows memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pipework.schedule import Timeline
from pipework.schedule.action import NONE
from pipework.timeline.flows import flows
from pipework.timeline.tracks import CHANNELS, Track, tracks

Event = dict[str, Any]

_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recompute", **CHANNELS}
)


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace of a timeline, as a dictionary for JSON.

    Args:
        timeline: in seconds, or in units of cost, each of which is shown as a millisecond.

    Returns:
        ``{"traceEvents": [...], "displayTimeUnit": "ms"}``, times in microseconds.

    Example:
        >>> from pipework.schedule import fill_drain, simulate
        >>> events = trace(simulate(fill_drain(2, 1)).timeline)["traceEvents"]
        >>> [event["name"] for event in events if event["ph"] == "X"]
        ['0F0', '0B0', '1F0', '1B0']
    """
    scale = 1e6 if timeline.unit == "s" else 1e3
    rows = tracks(timeline)
    events = [*_names(rows), *_slices(rows, scale), *_flows(timeline, rows, scale)]
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


def _names(rows: Sequence[Track]) -> Iterator[Event]:
    for worker, number, name, _ in rows:
        if number == 0:
            yield _event("M", "process_name", worker, args={"name": f"worker {worker}"})
            yield _event("M", "process_sort_index", worker, args={"sort_index": worker})
        yield _event("M", "thread_name", worker, number, args={"name": name})
        if number > 0:
            yield _event("M", "thread_sort_index", worker, number, args={"sort_index": number})


def _slices(rows: Sequence[Track], scale: float) -> Iterator[Event]:
    for row in rows:
        for interval in row.intervals:
            kind, stage, micro_batch, peer = interval.action
            about = {"stage": stage, "micro-batch": micro_batch, "peer": peer}
            yield _event(
                "X",
                str(interval.action),
                row.worker,
                row.number,
                cat=_KINDS[kind],
                ts=interval.start * scale,
                dur=(interval.end - interval.start) * scale,
                args={name: value for name, value in about.items() if value != NONE} | {"step": interval.step},
            )


def _flows(timeline: Timeline, rows: Sequence[Track], scale: float) -> Iterator[Event]:
    for number, (name, stops) in enumerate(flows(timeline, rows)):
        for phase, (worker, track, time) in zip(["s", *"t" * (len(stops) - 2), "f"], stops, strict=True):
            bound = {} if phase == "s" else {"bp": "e"}  # bind to the enclosing slice, not to the next one
            yield _event(phase, name, worker, track, cat="transfer", id=number, ts=time * scale, **bound)


def _memory(timeline: Timeline, scale: float) -> Iterator[Event]:
    name = "memory (bytes)" if timeline.memory_unit == "bytes" else "memory"
    for worker in range(timeline.workers):
        for time, held in timeline.memory_steps(worker):
            yield _event("C", name, worker, ts=time * scale, args={"held": held})


def _event(phase: str, name: str, worker: int, track: int = 0, **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": worker, "tid": track, **more}
