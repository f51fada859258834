"""Colours of the pictures."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

ACTION: Final[Mapping[str, str]] = MappingProxyType(
    {
        "F": "#84b0e3",
        "B": "#86c47c",
        "I": "#56b6ab",
        "W": "#c3e3b0",
        "R": "#a3b1c4",
        "update": "#f5d76b",
    }
)
"""Fill of each action kind, and of the optimizer's step."""

NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "F": "forward",
        "B": "backward",
        "I": "input gradient",
        "W": "weight gradient",
        "R": "recompute",
        "update": "optimizer",
    }
)
"""Name of each kind in legends and tooltips."""

WORKER: Final = ("#e8e8e8", "#f8e1c4", "#c4d5f4", "#e0ccd6", "#d2e8cf", "#dbd2f0", "#f6efc0", "#c9e7e6")
"""Fills of the workers; they repeat."""

INK: Final = "#22272e"
QUIET: Final = "#667180"
LINE: Final = "#e1e5ea"
MEMORY: Final = "#b4a7d6"
PAPER: Final = "#ffffff"

_DEPTHS: Final = (1.0, 0.84, 0.55, 0.42)  # Neither dark nor white text is readable on the tones between 0.84 and 0.55.


def action_fill(kind: str, depth: int) -> str:
    """The fill of an action, darker for each further stage of the same worker.

    Args:
        kind: action kind.
        depth: 0 for a worker's first stage, 1 for its second, ..

    Example:
        >>> action_fill("F", 0), action_fill("F", 1)
        ('#84b0e3', '#6e93be')
    """
    return _darker(ACTION[kind], _DEPTHS[min(depth, len(_DEPTHS) - 1)])


def ink_on(fill: str) -> str:
    """The colour of text on a fill: dark or white, the one with the higher contrast.

    Example:
        >>> ink_on("#84b0e3"), ink_on("#48607c")
        ('#22272e', '#ffffff')
    """
    light = _luminance(fill) + 0.05
    return INK if light / (_luminance(INK) + 0.05) >= (_luminance(PAPER) + 0.05) / light else PAPER


def worker_fill(worker: int) -> str:
    """The pastel fill of a worker.

    Example:
        >>> worker_fill(0) == worker_fill(8)
        True
    """
    return WORKER[worker % len(WORKER)]


def _darker(color: str, factor: float) -> str:
    channels = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{int(channel * factor):02x}" for channel in channels)


def _luminance(color: str) -> float:
    """Relative luminance, as WCAG defines it for contrast."""
    channels = (int(color[index : index + 2], 16) / 255 for index in (1, 3, 5))
    red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
