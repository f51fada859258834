"""Draws efficiency over the size of an action, as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipework.schedule.draw.palette import INK, LINE, PAPER, QUIET
from pipework.schedule.draw.svg_marks import FONT, number, rectangle, text

COLOURS = ("#22272e", "#3a76c4", "#2f9153", "#b8549b")
WIDTH, HEIGHT, LEFT, TOP, GAP = 400, 260, 68, 46, 34  # of a panel, and around it
Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One line of a panel.

    Attributes:
        name: in the legend.
        points: size in milliseconds and efficiency, in ascending order.
        level: below this efficiency the pipe is slower than one worker.
    """

    name: str
    points: Sequence[Point]
    level: float


def draw(panels: Mapping[str, Sequence[Curve]]) -> str:
    """The picture: one panel for each entry, all with the same curves and axes."""
    curves = [curve for group in panels.values() for curve in group]
    low = math.log10(min(curve.points[0][0] for curve in curves))
    high = math.log10(max(curve.points[-1][0] for curve in curves))
    scale = Scale(low, max(high, low + 0.1))
    width = LEFT + len(panels) * (WIDTH + GAP)
    height = TOP + HEIGHT + 104
    marks = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}" '
        f'width="{width}" height="{height}">',
        rectangle(0, 0, width, height, fill=PAPER),
    ]
    for place, (title, group) in enumerate(panels.items()):
        marks.append(f'<g transform="translate({LEFT + place * (WIDTH + GAP)} {TOP})">')
        marks += [
            *axes(title, scale, labelled=place == 0),
            *(drawn for each in zip(group, COLOURS, strict=False) for drawn in drawing(*each, scale)),
            "</g>",
        ]
    names = [curve.name for curve in next(iter(panels.values()))]
    marks += [*legend(names, height - 44), "</svg>"]
    return "\n".join(marks) + "\n"


@dataclass(frozen=True)
class Scale:
    """From size and efficiency to places in a panel.

    Attributes:
        low: the logarithm of the smallest size.
        high: that of the largest.
    """

    low: float
    high: float

    def x(self, size: float) -> float:
        return WIDTH * (math.log10(size) - self.low) / (self.high - self.low)

    def y(self, efficiency: float) -> float:
        return HEIGHT * (1 - efficiency)


def axes(title: str, scale: Scale, *, labelled: bool) -> list[str]:
    """Frame, grid and numbers."""
    marks = [text(WIDTH / 2, -16, title, 15, text_anchor="middle", font_weight="bold")]
    for percent in range(0, 101, 20):
        y = number(scale.y(percent / 100))
        marks.append(f'<path d="M0 {y}H{WIDTH}" stroke="{LINE}"/>')
        if labelled:
            marks.append(text(-8, scale.y(percent / 100) + 4, f"{percent}%", 12, text_anchor="end", fill=QUIET))
    for size in ticks(scale):
        x = scale.x(size)
        marks.append(f'<path d="M{number(x)} 0V{HEIGHT}" stroke="{LINE}"/>')
        marks.append(text(x, HEIGHT + 18, f"{size:g}", 12, text_anchor="middle", fill=QUIET))
    marks.append(text(WIDTH / 2, HEIGHT + 38, "milliseconds of an action", 12, text_anchor="middle", fill=QUIET))
    if labelled:
        place = f"translate(-48 {HEIGHT / 2}) rotate(-90)"
        marks.append(text(0, 0, "ideal step / measured step", 12, text_anchor="middle", fill=QUIET, transform=place))
    return marks


def ticks(scale: Scale) -> list[float]:
    """1, 2 and 5 of each power of ten."""
    powers = range(math.floor(scale.low), math.ceil(scale.high) + 1)
    sizes = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [size for size in sizes if scale.low - 1e-9 <= math.log10(size) <= scale.high + 1e-9]


def drawing(curve: Curve, colour: str, scale: Scale) -> list[str]:
    """The curve, dashed where the pipe does not pay, with a dot at each measured point."""
    marks = []
    for part, pays in parts(curve):
        path = "L".join(f"{number(scale.x(size))} {number(scale.y(min(height, 1.0)))}" for size, height in part)
        dashes = "" if pays else ' stroke-dasharray="3 4"'
        marks.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
    for size, height in curve.points:
        place = f'cx="{number(scale.x(size))}" cy="{number(scale.y(min(height, 1.0)))}"'
        marks.append(f'<circle {place} r="2.6" fill="{colour}"/>')
    return marks


def parts(curve: Curve) -> list[tuple[list[Point], bool]]:
    """The segments, cut where they cross the level, each with whether it is above."""
    result = []
    for (left, low), (right, high) in pairwise(curve.points):
        above, below = low >= curve.level, high >= curve.level
        if above == below:
            result.append(([(left, low), (right, high)], above))
            continue
        middle = left * (right / left) ** ((curve.level - low) / (high - low))
        result.append(([(left, low), (middle, curve.level)], above))
        result.append(([(middle, curve.level), (right, high)], below))
    return result


def legend(names: Sequence[str], y: float) -> list[str]:
    """The curves' names, and what dashes mean."""
    marks, x = [], float(LEFT)
    for name, colour in zip(names, COLOURS, strict=False):
        marks.append(f'<path d="M{number(x)} {number(y - 4)}h22" stroke="{colour}" stroke-width="2"/>')
        marks.append(f'<circle cx="{number(x + 11)}" cy="{number(y - 4)}" r="2.6" fill="{colour}"/>')
        marks.append(text(x + 30, y, name, 12, fill=INK))
        x += 190
    marks.append(f'<path d="M{LEFT} {number(y + 18)}h22" stroke="{QUIET}" stroke-width="2" stroke-dasharray="3 4"/>')
    marks.append(text(LEFT + 30, y + 22, "does not pay: slower than one worker", 12, fill=INK))
    return marks
