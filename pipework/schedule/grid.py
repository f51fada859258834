"""A timeline as text, for a terminal."""

from __future__ import annotations

from pipework.schedule.timeline import Interval, Timeline

_EXACT = 1e-9


def grid(timeline: Timeline, *, max_width: int = 160) -> str:
    """Draw a timeline as text, worker 0 on top, time to the right.

    An action shows as stage, kind and micro-batch, filled up with dashes, idle time as dots. If all times are multiples
    of the shortest action and there is room, each such unit is one column. Otherwise time is scaled to the width, and
    an action too narrow for its name shows its kind only.

    Args:
        timeline: any.
        max_width: characters of a line, the worker's name included.

    Returns:
        Lines without a newline at the end.

    Raises:
        ValueError: ``max_width`` is less than 40.

    Example:
        >>> from pipework.schedule import fill_drain, simulate
        >>> print(grid(simulate(fill_drain(2, 2)).timeline))
        worker 0  0F0 0F1  .   .   .  0B0---- 0B1----
        worker 1   .  1F0 1F1 1B0---- 1B1----  .   .
    """
    if max_width < 40:
        raise ValueError(f"max_width is {max_width}: wanted at least 40 characters")
    timeline = timeline.normalised()
    heads = [f"worker {worker}" for worker in range(timeline.workers)]
    indent = len(heads[-1]) + 2
    room = max_width - indent
    cell = 1 + max((len(str(interval.action)) for interval in timeline.intervals), default=1)
    columns = _columns(timeline, room // cell)
    idle = ".".rjust(cell // 2).ljust(cell) if columns else "."
    width = columns * cell or room
    scale = width / timeline.makespan if timeline.makespan else 0.0
    lines = []
    for head, row in zip(heads, timeline.by_worker, strict=True):
        characters = list((idle * width)[:width])
        for interval in row:
            first, last = round(interval.start * scale), round(interval.end * scale)
            characters[first:last] = _cell(interval, last - first)
        lines.append((head.ljust(indent) + "".join(characters)).rstrip())
    return "\n".join(lines)


def _columns(timeline: Timeline, most: int) -> int:
    """How many columns as long as the shortest action the timeline fills; 0 if not exactly, or more than `most`."""
    lengths = [interval.end - interval.start for interval in timeline.intervals]
    unit = min((length for length in lengths if length > 0), default=0.0)
    if not unit or timeline.makespan > unit * (most + _EXACT):
        return 0
    edges = (edge / unit for interval in timeline.intervals for edge in (interval.start, interval.end))
    return round(timeline.makespan / unit) if all(abs(edge - round(edge)) < _EXACT for edge in edges) else 0


def _cell(interval: Interval, width: int) -> list[str]:
    label = str(interval.action)
    if width > len(label):
        return list(label.ljust(width - 1, "-") + " ")
    return list(interval.action.kind.ljust(width, "-")[:width])
