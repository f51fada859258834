"""A timeline as a trace, in the JSON format of Perfetto and chrome://tracing.

Each worker is a process with a track "compute" and, if communication is known, "send", "receive", "offload" etc. Arrows
show the values and gradients that go from stage to stage, and a counter shows memory.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
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
    events = [*_names(rows), *_slices(timeline, rows, scale), *_flows(timeline, scale)]
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


def _flows(timeline: Timeline, scale: float) -> Iterator[Event]:
    """An arrow from each action to those that need its value or gradient: in the next stage, or where it is sent."""
    made: dict[tuple[int, str, int, int], Interval] = {}
    targets: dict[tuple[str, int], set[int]] = defaultdict(set)
    for interval in timeline.intervals:
        kind, stage, micro_batch, _ = interval.action
        if (product := timeline.table[kind].gives) in ("F", "B"):
            made[interval.step, product, stage, micro_batch] = interval
            targets[product, stage].add(stage + (1 if product == "F" else -1))
    for interval in timeline.communication:
        kind, stage, _, peer = interval.action
        targets[kind.removeprefix("SEND_"), stage].add(peer)
    arrows = itertools.count()
    for (step, product, stage, micro_batch), source in made.items():
        for peer in sorted(targets[product, stage]):
            used = made.get((step, product, peer, micro_batch))
            if used is not None:
                name, arrow = "value" if product == "F" else "gradient", next(arrows)
                # In the middle of both intervals. "bp": the end is of the interval around it, not of the next one.
                begin, end = ((each.start + each.end) / 2 * scale for each in (source, used))
                yield _event("s", name, source.worker, cat="transfer", id=arrow, ts=begin)
                yield _event("f", name, used.worker, cat="transfer", id=arrow, ts=end, bp="e")


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
        name: ``"compute"``, ``"send"``, ``"receive"``, ``"offload"``, ``"load"``, ``"reduce"`` or ``"gather"``; a
            second row is ``"send 2"``.
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
