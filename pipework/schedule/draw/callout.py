"""A box 'Bubble' in the largest idle area of a picture, or an arrow 'Time' if there is only one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipework.schedule.draw.palette import INK, PAPER
from pipework.schedule.draw.svg_marks import number, rectangle, text

# A readable word does not fit in smaller areas.
_LEAST_WIDTH, _LEAST_HEIGHT = 84.0, 24.0
# Larger sizes count as this one, so that compact areas are preferred to long and flat ones.
_MOST_WIDTH, _MOST_HEIGHT = 260.0, 90.0


class Area(NamedTuple):
    """An idle rectangle: from left to right in pixels, from row `first` to row `last`."""

    left: float
    right: float
    first: int
    last: int


def largest_idle(idle: Sequence[Sequence[tuple[float, float]]], pitch: float) -> Area | None:
    """The best idle rectangle for a callout.

    Args:
        idle: for each row the (left, right) of its idle times in pixels, ascending.
        pitch: distance of rows in pixels.

    Returns:
        The area, or None if none is large enough.

    Example:
        >>> largest_idle([[(0, 300)], [(50, 250)]], pitch=40.0)
        Area(left=50, right=250, first=0, last=1)
    """
    wide = [[(left, right) for left, right in row if right - left >= _LEAST_WIDTH] for row in idle]
    best: tuple[float, Area] | None = None
    for first in range(len(wide)):
        common = wide[first]
        for last in range(first, len(wide)):
            if last > first:
                common = _intersection(common, wide[last])
            height = (last - first + 1) * pitch
            for left, right in common:
                size = min(right - left, _MOST_WIDTH) * min(height, _MOST_HEIGHT)
                if height >= _LEAST_HEIGHT and (best is None or size > best[0] + 1e-6):
                    best = (size, Area(left, right, first, last))
            if not common:
                break
    return best[1] if best else None


def bubble(x: float, y: float, width: float, height: float) -> list[str]:
    """The callout, in the middle of an area with this center and size."""
    wide, high = min(0.62 * width, 150.0), min(0.74 * height, 64.0)
    size = min(0.4 * high, 0.2 * wide)
    return [
        rectangle(
            x - wide / 2, y - high / 2, wide, high, rx=min(12.0, high / 3), fill=PAPER, stroke=INK, stroke_width=1
        ),
        text(x, y + 0.35 * size, "Bubble", size, text_anchor="middle"),
    ]


def time_arrow(x: float, y: float, width: float, height: float) -> list[str]:
    """An arrow to the right with the text 'Time', in the middle of an area with this center and size."""
    wide, high = min(0.7 * width, 150.0), min(0.8 * height, 60.0)
    left, right, neck = x - wide / 2, x + wide / 2, x + wide / 2 - min(high / 2, wide / 3)
    corners = [
        (left, y - high / 4),
        (neck, y - high / 4),
        (neck, y - high / 2),
        (right, y),
        (neck, y + high / 2),
        (neck, y + high / 4),
        (left, y + high / 4),
    ]
    points = " ".join(f"{number(across)},{number(down)}" for across, down in corners)
    size = min(0.36 * high, 0.22 * wide)
    return [
        f'<polygon points="{points}" fill="{PAPER}" stroke="{INK}" stroke-width="1"/>',
        text((left + neck) / 2 + 4, y + 0.35 * size, "Time", size, text_anchor="middle"),
    ]


def _intersection(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(left, right) for left, right in pairs if right - left >= _LEAST_WIDTH]
