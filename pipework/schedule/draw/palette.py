"""Colours of the pictures."""

from __future__ import annotations

from typing import Final

UPDATE: Final = "#f5d76b"
"""Fill of the optimizer's step."""

WORKER: Final = ("#e8e8e8", "#f8e1c4", "#c4d5f4", "#e0ccd6", "#d2e8cf", "#dbd2f0", "#f6efc0", "#c9e7e6")
"""Fills of the workers; they repeat."""

INK: Final = "#22272e"
QUIET: Final = "#667180"
LINE: Final = "#e1e5ea"
MEMORY: Final = "#b4a7d6"
PAPER: Final = "#ffffff"

_DEPTHS: Final = (1.0, 0.84, 0.55, 0.42)  # Neither dark nor white text is readable on the tones between 0.84 and 0.55.


def cell_colors(fill: str | None, worker: int, depth: int = 0) -> tuple[str, str, str]:
    """The fill, text and frame of a cell.

    Args:
        fill: the colour of the kind; None: the pastel of the worker.
        worker: number of the worker.
        depth: 0 for a worker's first stage, 1 for its second, ..; each is darker than the one before.

    Example:
        >>> cell_colors("#84b0e3", 0), cell_colors("#84b0e3", 0, depth=2)
        (('#84b0e3', '#22272e', '#ffffff'), ('#48607c', '#ffffff', '#ffffff'))
    """
    if fill is None:
        return WORKER[worker % len(WORKER)], INK, "#4a4f57"
    return _darker(fill, _DEPTHS[min(depth, len(_DEPTHS) - 1)]), INK if depth < 2 else PAPER, PAPER


def _darker(color: str, factor: float) -> str:
    channels = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{int(channel * factor):02x}" for channel in channels)
