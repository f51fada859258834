"""Flows: the ways of values and gradients from stage to stage, from slice to slice of a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from pipework.schedule import Interval, Timeline
from pipework.timeline.tracks import Track


class Stop(NamedTuple):
    """A moment within an interval on a worker's track.

    Attributes:
        worker: whose.
        track: its number.
        time: in the timeline's unit.
    """

    worker: int
    track: int
    time: float


class _Edge(NamedTuple):
    """What is sent from one stage (`source`) to another: values if `direction` is "F", gradients if it is "B"."""

    step: int
    direction: str
    source: int
    target: int
    micro_batch: int


_Place = tuple[Interval, int]  # with the number of its track


def flows(timeline: Timeline, tracks: Sequence[Track]) -> Iterator[tuple[str, list[Stop]]]:
    """The flows of a timeline: between neighbours, and across any stages where something was sent.

    Args:
        timeline: what happened.
        tracks: of that timeline.

    Yields:
        ``"value"`` or ``"gradient"``, and at least two stops in order of time: from the action that made it, by way of
        the channels that are known, to the action that needs it.

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
        way = (
            made.get((step, direction, source, micro_batch)),
            sent.get(edge),
            received.get(edge),
            made.get((step, direction, target, micro_batch)),
        )
        known = [place for place in way if place is not None]
        if len(known) > 1:
            yield "value" if direction == "F" else "gradient", list(_stops(known))


def _stops(places: Sequence[_Place]) -> Iterator[Stop]:
    """A stop in each interval: in its middle, so that it is in no doubt whose it is, even if the next follows at once.

    A viewer follows a flow in order of time, but a send and its receive may happen at the same time. Then the stop in
    a channel is in the middle of what is left of its interval; where nothing is left, the flow passes by.
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
