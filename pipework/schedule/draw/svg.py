"""A timeline, or several above each other, as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from pipework.schedule.argument_checks import one_of
from pipework.schedule.draw.palette import INK, LINE, MEMORY, PAPER, QUIET, UPDATE
from pipework.schedule.draw.svg_marks import FONT, clean, group, number, rectangle, text, text_width
from pipework.schedule.draw.svg_panel import Frame, Look, panel, peak_text
from pipework.schedule.draw.units import memory_text, ticks, time_scale, time_text
from pipework.schedule.timeline import Timeline

Colors = Literal["action", "worker"]
"""The meaning of colours: the kind of an action, or its worker (usual for fill-drain)."""

_MARGIN = 18.0
_UPDATE_WIDTH = 54.0
_LEAST_WIDTH, _MOST_WIDTH = 420.0, 1080.0


def svg(
    timelines: Timeline | Sequence[Timeline],
    *,
    colors: Colors = "action",
    update: bool = False,
) -> str:
    """Draw timelines above each other on a common time axis, such as a predicted above a measured one.

    There is a row for each worker, worker 0 on top; time goes to the right, and idle time is white. Each cell
    has a tooltip. A cell that is too narrow for its label has none. Copies to and from the host are thin bars below.

    Args:
        timelines: one or several, all in the same unit; each is drawn from its own start.
        colors: ``"action"``: a colour for each kind of action, darker for the second stage of a worker; ``"worker"``: a
            pastel colour for each worker. A cell shows its micro-batch, and below the row is a strip of memory, if that
            is known; with ``"worker"`` a cell shows kind, stage and micro-batch, and there is no strip.
        update: add a box for the optimizer's step after each row.

    Returns:
        The picture, as valid XML without external references.

    Raises:
        ValueError: there is no timeline, units differ, or ``colors`` has an unknown value.

    Example:
        >>> from pipework.schedule import fill_drain, simulate
        >>> svg(simulate(fill_drain(4, 4)).timeline, colors="worker", update=True)[:28]
        '<svg xmlns="http://www.w3.or'
    """
    lines = (timelines,) if isinstance(timelines, Timeline) else tuple(timelines)
    _check(lines, colors)
    lines = tuple(line.normalised() for line in lines)
    of_kinds = colors == "action"
    # The kinds that are there, in the order of their tables.
    shown = {each.action.kind for line in lines for each in (*line.intervals, *line.communication)}
    kinds = {kind: row for line in lines for kind, row in line.table.items() if kind in shown}
    copies = tuple(kind for kind, row in kinds.items() if row.scope == "copy")
    look = Look(of_kinds, of_kinds and any(line.knows_memory for line in lines), copies)

    longest = max(line.makespan for line in lines)
    workers = max(line.workers for line in lines)
    left = _MARGIN + 13 * text_width(f"worker {workers - 1}") + 4
    plot = _plot_width(lines, 30.0 if of_kinds else 40.0)
    update_width = _UPDATE_WIDTH if update else 0.0
    peaks = [text_width(peak_text(line, worker)) for line in lines for worker in range(line.workers)]
    width = left + plot + update_width + (12 * max(peaks) + 10 if look.memory else 0.0) + _MARGIN

    marks: list[str] = []
    frames: list[Frame] = []
    y = _MARGIN - 6
    for line in lines:
        head, y = _head(line, y, longest)
        frame = Frame(left, y, plot, longest, line.workers, look, update_width)
        y = frame.bottom + (20 if line is not lines[-1] else 0)
        frames.append(frame)
        marks.append(head)
    axis = _axis(frames, lines[0].unit, grid=of_kinds)
    marks.append(axis)
    for line, frame in zip(lines, frames, strict=True):
        marks.append(panel(line, frame, _peak(each for each in lines if each.memory_unit == line.memory_unit)))
    y += 30
    if of_kinds:
        entries = [(row.color, row.name) for row in kinds.values() if row.scope in ("micro-batch", "copy")]
        entries += [(UPDATE, "optimizer")] if update else []
        entries += [(MEMORY, "memory")] if look.memory else []
        marks.append(_legend(lines, entries, left, y + 14))
        y += 24
    return _document(marks, width, y + 4, "; ".join(line.title for line in lines if line.title) or "timeline")


def _check(lines: Sequence[Timeline], colors: str) -> None:
    if not lines:
        raise ValueError("no timeline was given: pass one, or a sequence of at least one")
    units = sorted({line.unit for line in lines})
    if len(units) > 1:
        raise ValueError(f"timelines with the units {units} have no common axis: draw them separately, or convert them")
    one_of("colors", colors, get_args(Colors))


def _plot_width(lines: Sequence[Timeline], cell: float) -> float:
    """Wide enough for labels in most cells, but not wider than a page."""
    lengths = sorted(each.end - each.start for line in lines for each in line.intervals if each.end > each.start)
    usual = lengths[len(lengths) // 4] if lengths else 1.0
    return min(max(max(line.makespan for line in lines) / usual * cell, _LEAST_WIDTH), _MOST_WIDTH)


def _head(line: Timeline, y: float, longest: float) -> tuple[str, float]:
    facts = [f"bubble {line.bubble:.1%}", f"makespan {time_text(line.makespan, line.unit, longest)}"]
    if line.makespan - line.span > 1e-6 * line.makespan:
        facts.insert(1, f"of the span {time_text(line.span, line.unit, longest)}: {line.span_bubble:.1%}")
    if line.knows_memory:
        facts.append(f"peak memory {memory_text(_peak([line]), line.memory_unit)}")
    marks = []
    if line.title:
        marks.append(text(_MARGIN, y + 16, line.title, 15, font_weight="bold"))
        y += 18
    marks.append(text(_MARGIN, y + 16, " \u00b7 ".join(facts), 12, fill=QUIET))
    return group(marks), y + 28


def _peak(lines: Iterable[Timeline]) -> float:
    return max(line.peak_memory(worker) for line in lines for worker in range(line.workers))


def _axis(frames: Sequence[Frame], unit: str, *, grid: bool) -> str:
    frame = frames[-1]
    size, name = time_scale(frame.longest, unit)
    base = frame.bottom + 6
    start, end = number(frame.left), number(frame.left + frame.width)
    marks = [f'<path d="M{start} {number(base)}H{end}" stroke="{QUIET}" fill="none"/>']
    values = ticks(frame.longest / size, int(frame.width // 64))
    for value in values:
        x = frame.x(value * size)
        if grid:
            for each in frames:
                marks.append(f'<path d="M{number(x)} {number(each.top)}V{number(each.bottom)}" stroke="{LINE}"/>')
        marks.append(f'<path d="M{number(x)} {number(base)}v4" stroke="{QUIET}"/>')
        marks.append(text(x, base + 16, f"{value:.6g}", 11, fill=QUIET, text_anchor="middle"))
    title = f"time ({name})" if name else "time"
    marks.append(text(frame.left - 12, base + 16, title, 11, fill=QUIET, text_anchor="end"))
    return group(marks)


def _legend(lines: Sequence[Timeline], entries: Sequence[tuple[str, str]], x: float, y: float) -> str:
    held = {(each.worker, each.action.stage) for line in lines for each in line.intervals}
    marks = []
    for color, name in entries:
        marks.append(rectangle(x, y - 10, 12, 12, fill=color, rx=2))
        marks.append(text(x + 17, y, name, 12))
        x += 17 + 12 * text_width(name) + 18
    if len(held) > len({worker for worker, _ in held}):
        marks.append(text(x, y, "darker: further stage of a worker", 12, fill=QUIET))
    return group(marks)


def _document(marks: Sequence[str], width: float, height: float, name: str) -> str:
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{clean(name)}" '
            f'font-family="{FONT}" fill="{INK}">',
            # A white background, so that dark text is readable on a dark page.
            rectangle(0, 0, width, height, fill=PAPER, rx=6),
            *marks,
            "</svg>\n",
        ]
    )
