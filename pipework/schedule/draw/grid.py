"""A timeline as text, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipework.schedule.action import Action
from pipework.schedule.timeline import Interval, Timeline

_EXACT = 1e-9


def grid(timeline: Timeline, *, max_width: int = 160) -> str:
    """Draw a timeline as text, worker 0 on top, time to the right.

    Actions are written as stage, kind and micro-batch, padded with dashes; idle time is written as dots. If that is too
    wide for some action, all are written as kind and micro-batch; if that is too wide, too, as kind only. If all times
    are multiples of the shortest action and the width suffices, each such unit is one column. Otherwise time is scaled
    to the width.

    Args:
        timeline: any timeline.
        max_width: the most characters of a line, including the worker's name.

    Returns:
        Lines without a newline at the end; a message if no action takes any time.

    Raises:
        ValueError: ``max_width`` is less than 40.

    Example:
        >>> from pipework.schedule import fill_drain, simulate
        >>> print(grid(simulate(fill_drain(2, 2)).timeline))
        worker 0  0F0 0F1  .   .   .  0B0---- 0B1----
        worker 1   .  1F0 1F1 1B0---- 1B1----  .   .
        >>> print(grid(simulate(fill_drain(2, 2)).timeline, max_width=40))
        worker 0  F0 F1 .  .  .  B0--- B1---
        worker 1  .  F0 F1 B0--- B1--- .  .
    """
    if max_width < 40:
        raise ValueError(f"max_width is {max_width}: wanted at least 40 characters")
    timeline = timeline.normalised()
    if not timeline.makespan:
        return "nothing to draw: no action takes any time"
    heads = [f"worker {worker}" for worker in range(timeline.workers)]
    indent = len(heads[-1]) + 2
    room = max_width - indent
    scales = (_scale(timeline, room, label) for label in (str, lambda action: f"{action.kind}{action.micro_batch}"))
    scale = next(filter(None, scales), _Scale(lambda action: action.kind, ".", room, room / timeline.makespan))
    lines = []
    for head, row in zip(heads, timeline.by_worker, strict=True):
        characters = list((scale.idle * scale.width)[: scale.width])
        for interval in row:
            first, last = scale.ends(interval)
            characters[first:last] = _cell(scale.label(interval.action), last - first)
        lines.append((head.ljust(indent) + "".join(characters)).rstrip())
    return "\n".join(lines)


class _Scale(NamedTuple):
    """The label of actions, the text of idle time, the width in characters, and characters for each unit of time."""

    label: Callable[[Action], str]
    idle: str
    width: int
    factor: float

    def ends(self, interval: Interval) -> tuple[int, int]:
        return round(interval.start * self.factor), round(interval.end * self.factor)


def _scale(timeline: Timeline, room: int, label: Callable[[Action], str]) -> _Scale | None:
    """The scale for a form of labels; None if an action is too narrow for its label and a blank."""
    cell = 1 + max((len(label(interval.action)) for interval in timeline.intervals), default=1)
    columns = _columns(timeline.intervals, timeline.makespan, room // cell)
    width = columns * cell or room
    idle = ".".rjust(cell // 2).ljust(cell) if columns else "."
    scale = _Scale(label, idle, width, width / timeline.makespan)
    for interval in timeline.intervals:
        first, last = scale.ends(interval)
        if 0 < last - first <= len(label(interval.action)):
            return None
    return scale


def _columns(intervals: Sequence[Interval], makespan: float, most: int) -> int:
    """The number of columns as long as the shortest action; 0 if times are no multiples of it, or above `most`."""
    unit = min((interval.end - interval.start for interval in intervals if interval.end > interval.start), default=0.0)
    if not unit or makespan > unit * (most + _EXACT):
        return 0
    edges = (edge / unit for interval in intervals for edge in (interval.start, interval.end))
    return round(makespan / unit) if all(abs(edge - round(edge)) < _EXACT for edge in edges) else 0


def _cell(label: str, width: int) -> str:
    return label.ljust(width - 1, "-") + " " if width > len(label) > 1 else label.ljust(width, "-")[:width]
