"""One timeline of a picture: rows of cells, memory strips, and the texts beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipework.schedule.draw.palette import LINE, MEMORY, QUIET, UPDATE, cell_colors
from pipework.schedule.draw.svg_marks import clean, group, number, rectangle, text, text_width
from pipework.schedule.draw.units import memory_text, time_text
from pipework.schedule.timeline import Interval, Timeline


@dataclass(frozen=True)
class Look:
    """Options of a picture: whether colours show kinds, not workers; strips of memory.

    And the kinds of copies, each of which has a lane of thin bars below a row.
    """

    of_kinds: bool
    memory: bool
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Frame:
    """The position of a timeline in a picture, in pixels.

    Attributes:
        left, top, width: of the plot.
        longest: the time that fills the width.
        workers: number of rows.
        look: options of the picture.
        update_width: width of the boxes after the plot; 0 if there are none.
    """

    left: float
    top: float
    width: float
    longest: float
    workers: int
    look: Look
    update_width: float

    @property
    def row(self) -> float:
        """Height of a row's cells."""
        return max(14.0, min(30.0 if self.look.of_kinds else 42.0, 640.0 / self.workers))

    @property
    def lanes(self) -> float:
        """Height of the lanes of copies below a row."""
        return 5.0 * len(self.look.copies)

    @property
    def strip(self) -> float:
        """Height of the memory strip below a row."""
        return max(8.0, 0.6 * self.row) if self.look.memory else 0.0

    @property
    def pitch(self) -> float:
        """Distance of rows."""
        return self.row + self.lanes + self.strip + (6.0 if self.look.of_kinds else 0.0)

    @property
    def bottom(self) -> float:
        """Lower edge of the last row."""
        return self.top + self.workers * self.pitch

    def x(self, time: float) -> float:
        """Horizontal position of a time."""
        return self.left + (time / self.longest * self.width if self.longest else 0.0)

    def y(self, worker: int) -> float:
        """Upper edge of a worker's row; worker 0 is on top."""
        return self.top + worker * self.pitch


def panel(line: Timeline, frame: Frame, most_memory: float) -> str:
    """Draw the rows of a timeline that starts at 0; an amount of `most_memory` fills a memory strip."""
    marks: list[str] = []
    caption = Caption.fitting(line, frame)
    for worker in range(line.workers):
        marks.extend(_beside(line, frame, worker))
        if frame.look.memory and line.knows_memory:
            marks.append(_strip(line, frame, worker, most_memory))
    for row in line.by_worker:
        depths = {stage: depth for depth, stage in enumerate(sorted({each.action.stage for each in row}))}
        cells = [_cell(each, frame, caption, line, depths[each.action.stage]) for each in row]
        marks.append(group(cells, text_anchor="middle", stroke_width=0.9))
    bars = [_bar(each, frame, line) for each in line.communication if each.action.kind in frame.look.copies]
    if bars:
        marks.append(group(bars))
    if frame.update_width:
        marks.extend(_update_boxes(line, frame))
    return group(marks)


@dataclass(frozen=True)
class Caption:
    """Form and size of the labels, the same for all cells of a timeline.

    Attributes:
        form: ``"stage"``: kind, with stage and micro-batch as subscript; ``"kind"``; or ``"micro_batch"``.
        size: of the font, in pixels.
        widest: width of the widest caption, in font sizes.
    """

    form: str
    size: float
    widest: float = 0.0

    @classmethod
    def fitting(cls, line: Timeline, frame: Frame) -> Caption:
        """The most detailed form that fits the narrow cells of a timeline."""
        forms = ["micro_batch"] if frame.look.of_kinds else ["stage", "kind"]
        widths = sorted(frame.x(each.end) - frame.x(each.start) for each in line.intervals)
        if not widths:
            return cls(forms[0], 0.0)
        narrow = widths[len(widths) // 4] - 3
        most = min(13.0 if frame.look.of_kinds else 19.0, 0.5 * frame.row)
        sized = []
        for form in forms:
            widest = max(text_width(*cls(form, 1.0).label(each)) for each in line.intervals)
            sized.append((form, min(most, narrow / widest), widest))
        form, size, widest = next((each for each in sized if each[1] >= 8.0), sized[-1])
        return cls(form, max(size, 6.6), widest)

    def fitted(self, interval: Interval, width: float) -> tuple[str, str]:
        """Text and subscript for a cell of this width; the kind alone, or nothing, if the cell is too narrow."""
        # The widest label decides, so that of cells of equal width either all or none have one.
        if self.widest * self.size + 1.5 <= width:
            return self.label(interval)
        short = "" if self.form == "micro_batch" else interval.action.kind
        return (short, "") if text_width(short) * self.size + 1.5 <= width else ("", "")

    def label(self, interval: Interval) -> tuple[str, str]:
        """Text and subscript of a cell."""
        kind, stage, micro_batch, _ = interval.action
        if self.form == "micro_batch":
            return f"{micro_batch}", ""
        return kind, f"{stage},{micro_batch}" if self.form == "stage" else ""


def _cell(interval: Interval, frame: Frame, caption: Caption, line: Timeline, depth: int) -> str:
    x, y = frame.x(interval.start), frame.y(interval.worker)
    width = frame.x(interval.end) - x
    color = line.table[interval.action.kind].color if frame.look.of_kinds else None
    fill, ink, border = cell_colors(color, interval.worker, depth)
    tooltip = _tooltip(interval, line)
    if line.knows_memory:
        tooltip += f", memory {memory_text(interval.memory, line.memory_unit)}"
    stroke: dict[str, str | float] = {"stroke": border} if width >= 2 else {}
    if stroke and width < 8:
        stroke["stroke_width"] = width / 9  # A full frame would hide a very narrow cell.
    marks = [f"<title>{clean(tooltip)}</title>", rectangle(x, y, max(width, 0.4), frame.row, fill=fill, **stroke)]
    label, sub = caption.fitted(interval, width)
    if label:
        middle, base = x + width / 2, y + frame.row / 2 + 0.34 * caption.size
        marks.append(text(middle, base, label, caption.size, sub=sub, fill=ink))
    return f"<g>{''.join(marks)}</g>"


def _bar(interval: Interval, frame: Frame, line: Timeline) -> str:
    """A copy beside the computation."""
    x, kind = frame.x(interval.start), interval.action.kind
    y = frame.y(interval.worker) + frame.row + 5.0 * frame.look.copies.index(kind) + 1
    bar = rectangle(x, y, max(frame.x(interval.end) - x - 0.9, 0.4), 4, fill=line.table[kind].color)
    return f"<g><title>{clean(_tooltip(interval, line))}</title>{bar}</g>"


def _tooltip(interval: Interval, line: Timeline) -> str:
    kind, stage, micro_batch, _ = interval.action
    times = (interval.start, interval.end, interval.end - interval.start)
    start, end, length = (time_text(time, line.unit, line.end) for time in times)
    return f"{line.table[kind].name} of stage {stage}, micro-batch {micro_batch}: {start} to {end} ({length})"


def _beside(line: Timeline, frame: Frame, worker: int) -> Iterator[str]:
    y = frame.y(worker)
    size = min(13.0, 0.75 * frame.row)
    yield text(frame.left - 8, y + frame.row / 2 + 0.35 * size, f"worker {worker}", size, text_anchor="end", fill=QUIET)
    if frame.look.memory and line.knows_memory:
        x = frame.left + frame.width + frame.update_width + 10
        yield text(x, y + frame.row / 2 + 0.35 * size, peak_text(line, worker), min(size, 12.0), fill=QUIET)


def peak_text(line: Timeline, worker: int) -> str:
    """The text beside a worker's row."""
    return f"peak {memory_text(line.peak_memory(worker), line.memory_unit)}"


def _strip(line: Timeline, frame: Frame, worker: int, most: float) -> str:
    """The filled curve of memory over time."""
    base = frame.y(worker) + frame.row + frame.lanes + frame.strip
    scale = (frame.strip - 1.5) / most if most else 0.0
    path = "".join(
        f"H{number(frame.x(time))}V{number(base - held * scale)}" for time, held in line.memory_steps(worker)
    )
    start, end = f"M{number(frame.left)} {number(base)}", f"H{number(frame.left + frame.width)}"
    ground = f'<path d="{start}{end}" stroke="{LINE}" fill="none"/>'
    return f'<path d="{start}{path}{end}V{number(base)}Z" fill="{MEMORY}"/>{ground}'


def _update_boxes(line: Timeline, frame: Frame) -> Iterator[str]:
    x, size = frame.x(line.end), min(12.0, 0.6 * frame.row)
    for worker in range(line.workers):
        y = frame.y(worker)
        fill, _, border = cell_colors(UPDATE if frame.look.of_kinds else None, worker)
        yield rectangle(x, y, frame.update_width, frame.row, fill=fill, stroke=border, stroke_width=0.9)
        middle = x + frame.update_width / 2
        yield text(middle, y + frame.row / 2 + 0.35 * size, "Update", size, text_anchor="middle")
