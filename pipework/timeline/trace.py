"""A timeline as a trace, in the JSON format of Perfetto and chrome://tracing.

Each worker is a process with a track "compute" and, if communication is known, "send", "receive" and "reduce". Arrows
show the values and gradients that go from stage to stage, and a counter shows memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from pipework.schedule import Interval, Timeline
from pipework.schedule.action import NONE

Event = dict[str, Any]


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
    events = [*_names(rows), *_slices(timeline, rows, scale), *_flows(timeline, rows, scale)]
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


def _slices(timeline: Timeline, rows: Sequence[Track], scale: float) -> Iterator[Event]:
    for row in rows:
        for interval in row.intervals:
            kind, stage, micro_batch, peer = interval.action
            about = {"stage": stage, "micro-batch": micro_batch, "peer": peer}
            times = {"ts": interval.start * scale, "dur": (interval.end - interval.start) * scale}
            known = {name: value for name, value in about.items() if value != NONE} | {"step": interval.step}
            name = timeline.table[kind].name
            yield _event("X", str(interval.action), row.worker, row.number, cat=name, **times, args=known)


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


class Track(NamedTuple):
    """A row of a worker.

    Attributes:
        worker: number of the worker.
        number: of the row; 0 is the computation.
        name: ``"compute"``, ``"send"``, ``"receive"``, ``"reduce"`` or ``"gather"``; a second row is ``"send 2"``.
        intervals: in order of time.
    """

    worker: int
    number: int
    name: str
    intervals: tuple[Interval, ...]


def tracks(timeline: Timeline) -> list[Track]:
    """The rows of all workers; rows of communication only if they have intervals.

    Example:
        >>> from pipework.schedule import Action
        >>> sends = (Interval(0, Action("SEND_F", 0, micro_batch, 1), micro_batch, 1.5) for micro_batch in (0, 1))
        >>> [track.name for track in tracks(Timeline((), workers=1, communication=tuple(sends)))]
        ['compute', 'send', 'send 2']
    """
    names = {kind: row.name for kind, row in timeline.table.items()}
    found: list[Track] = []
    for worker, row in enumerate(timeline.by_worker):
        named: list[tuple[str, Sequence[Interval]]] = [("compute", row)]
        own = [each for each in timeline.communication if each.worker == worker]
        for name in dict.fromkeys(names.values()):
            lanes = _lanes(each for each in own if names[each.action.kind] == name)
            named += [(name if count == 1 else f"{name} {count}", lane) for count, lane in enumerate(lanes, 1)]
        found += [Track(worker, number, name, tuple(lane)) for number, (name, lane) in enumerate(named)]
    return found


def _lanes(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """As few rows as possible without overlaps."""
    lanes: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda interval: (interval.start, interval.end)):
        lane = next((lane for lane in lanes if lane[-1].end <= interval.start), None)
        if lane is None:
            lane = []
            lanes.append(lane)
        lane.append(interval)
    return lanes


class Stop(NamedTuple):
    """A point of a flow: a time within an interval on a worker's track.

    Attributes:
        worker: number of the worker.
        track: number of the track.
        time: in the timeline's unit.
    """

    worker: int
    track: int
    time: float


_Place = tuple[Interval, int]  # an interval, and the number of its track


def flows(timeline: Timeline, tracks: Sequence[Track]) -> Iterator[tuple[str, list[Stop]]]:
    """The flows of a timeline, between adjacent stages and between all stages with a transfer.

    Yields:
        ``"value"`` or ``"gradient"``, and at least two stops in order of time: the action that makes it, the send and
        the receive if they are known, and the action that needs it.

    Example:
        >>> from pipework.schedule import fill_drain, simulate
        >>> line = simulate(fill_drain(2, 1)).timeline
        >>> next(flows(line, tracks(line)))
        ('value', [Stop(worker=0, track=0, time=0.5), Stop(worker=1, track=0, time=1.5)])
    """
    # By step, direction ("F" for values, "B" for gradients), stages and micro-batch.
    made: dict[tuple[int, str, int, int], _Place] = {}
    channels: dict[str, dict[tuple[int, str, int, int, int], _Place]] = {"SEND": {}, "RECV": {}}
    for track in tracks:
        for interval in track.intervals:
            kind, stage, micro_batch, peer = interval.action
            way, _, direction = kind.partition("_")
            if (product := timeline.table[kind].gives) in ("F", "B"):
                made[interval.step, product, stage, micro_batch] = interval, track.number
            elif way in channels:
                ends = (stage, peer) if way == "SEND" else (peer, stage)
                channels[way][(interval.step, direction, *ends, micro_batch)] = interval, track.number
    near = ((step, way, stage, stage + (1 if way == "F" else -1), number) for step, way, stage, number in made)
    for edge in dict.fromkeys(chain(near, *channels.values())):
        step, direction, source, target, micro_batch = edge
        places = (
            made.get((step, direction, source, micro_batch)),
            *(channel.get(edge) for channel in channels.values()),
            made.get((step, direction, target, micro_batch)),
        )
        known = [place for place in places if place is not None]
        if len(known) > 1:
            yield "value" if direction == "F" else "gradient", list(_stops(known))


def _stops(places: Sequence[_Place]) -> Iterator[Stop]:
    """A stop in the middle of each interval, so that viewers attach it to this interval and not to an adjacent one.

    The stops of a flow must be in order of time, but a send and its receive may overlap. Then the stop in a channel is
    in the middle of the part of its interval after the stop before it; if no part remains, the stop is left out.
    """
    last = -math.inf
    for index, (interval, track) in enumerate(places):
        begin = max(interval.start, last) if track > 0 else interval.start
        if begin >= interval.end:
            if 0 < index < len(places) - 1:
                continue
            begin = interval.start
        last = (begin + interval.end) / 2
        yield Stop(interval.worker, track, last)
