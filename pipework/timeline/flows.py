"""Flows: the arrows of a trace, along which values and gradients go from stage to stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from pipework.schedule import Interval, Timeline
from pipework.timeline.tracks import Track


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


class _Edge(NamedTuple):
    """A value (direction "F") or gradient ("B") that goes from one stage (`source`) to another."""

    step: int
    direction: str
    source: int
    target: int
    micro_batch: int


_Place = tuple[Interval, int]  # an interval, and the number of its track


def flows(timeline: Timeline, tracks: Sequence[Track]) -> Iterator[tuple[str, list[Stop]]]:
    """The flows of a timeline, between adjacent stages and between all stages with a transfer.

    Yields:
        ``"value"`` or ``"gradient"``, and at least two stops in order of time: the action that makes it, the send and
        the receive if they are known, and the action that needs it.

    Example:
        >>> from pipework.schedule import fill_drain, simulate
        >>> from pipework.timeline.tracks import tracks
        >>> line = simulate(fill_drain(2, 1)).timeline
        >>> next(flows(line, tracks(line)))
        ('value', [Stop(worker=0, track=0, time=0.5), Stop(worker=1, track=0, time=1.5)])
    """
    made: dict[tuple[int, str, int, int], _Place] = {}
    for interval in timeline.intervals:
        kind, stage, micro_batch, _ = interval.action
        if kind in ("F", "B", "I"):
            made[interval.step, "F" if kind == "F" else "B", stage, micro_batch] = interval, 0
    sent: dict[_Edge, _Place] = {}
    received: dict[_Edge, _Place] = {}
    for track in tracks:
        for interval in track.intervals:
            kind, stage, micro_batch, peer = interval.action
            if kind in ("SEND_F", "SEND_B"):
                sent[_Edge(interval.step, kind[-1], stage, peer, micro_batch)] = interval, track.number
            elif kind in ("RECV_F", "RECV_B"):
                received[_Edge(interval.step, kind[-1], peer, stage, micro_batch)] = interval, track.number
    near = (
        _Edge(step, direction, stage, stage + (1 if direction == "F" else -1), micro_batch)
        for step, direction, stage, micro_batch in made
    )
    for edge in dict.fromkeys(chain(near, sent, received)):
        step, direction, source, target, micro_batch = edge
        places = (
            made.get((step, direction, source, micro_batch)),
            sent.get(edge),
            received.get(edge),
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
