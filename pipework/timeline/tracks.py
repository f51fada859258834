"""Tracks: rows of computation and communication of each worker, without overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from pipework.schedule import Interval, Timeline

CHANNELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "SEND_F": "send", "SEND_B": "send", "RECV_F": "receive", "RECV_B": "receive",
        "REDUCE_GRAD": "reduce", "UNSHARD": "gather",
    }
)  # fmt: skip


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
    channels: list[dict[str, list[Interval]]] = [
        {name: [] for name in CHANNELS.values()} for _ in range(timeline.workers)
    ]
    for interval in timeline.communication:
        channels[interval.worker][CHANNELS[interval.action.kind]].append(interval)
    found: list[Track] = []
    for worker, row in enumerate(timeline.by_worker):
        found.append(Track(worker, 0, "compute", row))
        named = (
            (name if count == 1 else f"{name} {count}", lane)
            for name, intervals in channels[worker].items()
            for count, lane in enumerate(_lanes(intervals), 1)
        )
        found.extend(Track(worker, number, name, tuple(lane)) for number, (name, lane) in enumerate(named, 1))
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
