"""The elements of an SVG picture: rectangles, text, groups, and short forms of numbers."""

from __future__ import annotations

import re
from html import escape

from pipework.schedule.draw.palette import INK

FONT = "Helvetica, Arial, sans-serif"

_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def number(value: float) -> str:
    """A coordinate with at most two decimals, the same on every machine.

    Example:
        >>> number(3.0), number(1 / 3), number(-0.001)
        ('3', '0.33', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def clean(text: str) -> str:
    r"""Escape text for XML, and remove characters that XML does not allow.

    Example:
        >>> clean("a<b\x00")
        'a&lt;b'
    """
    return escape(_FORBIDDEN.sub("", text))


def rectangle(x: float, y: float, width: float, height: float, **attributes: str | float) -> str:
    """A ``<rect>``; names of further attributes have ``_`` instead of ``-``.

    Example:
        >>> rectangle(0, 0, 10, 5, fill="#fff", stroke_width=1)
        '<rect x="0" y="0" width="10" height="5" fill="#fff" stroke-width="1"/>'
    """
    size = f'width="{number(width)}" height="{number(height)}"'
    return f'<rect x="{number(x)}" y="{number(y)}" {size}{_written(attributes)}/>'


def text(x: float, y: float, content: str, size: float, *, sub: str = "", **attributes: str | float) -> str:
    """A ``<text>`` whose baseline is at ``y``, with a subscript if there is one.

    Example:
        >>> text(1, 2, "F", 10, sub="3,0", fill="#000")
        '<text x="1" y="2" font-size="10" fill="#000">F<tspan dy="2.4" font-size="6">3,0</tspan></text>'
    """
    attributes.setdefault("fill", INK)
    # Browsers differ on baseline-shift, so use dy; nothing follows the subscript, so no shift back is needed.
    low = f'<tspan dy="{number(0.24 * size)}" font-size="{number(0.6 * size)}">{clean(sub)}</tspan>' if sub else ""
    place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}"'
    return f"<text {place}{_written(attributes)}>{clean(content)}{low}</text>"


def text_width(content: str, sub: str = "") -> float:
    """The approximate width of a text, in font sizes.

    Example:
        >>> round(text_width("F", "3,0"), 2)
        1.51
    """

    def width(piece: str) -> float:
        return sum(0.28 if each in ",.: il" else 0.67 if each.isupper() else 0.56 for each in piece)

    return width(content) + 0.6 * width(sub)


def group(marks: list[str], **attributes: str | float) -> str:
    r"""A ``<g>`` around marks, one line each.

    Example:
        >>> group(["<rect/>"], fill="red")
        '<g fill="red">\n<rect/>\n</g>'
    """
    return "\n".join([f"<g{_written(attributes)}>", *marks, "</g>"])


def _written(attributes: dict[str, str | float]) -> str:
    parts = []
    for name, value in attributes.items():
        shown = value if isinstance(value, str) else number(value)
        parts.append(f' {name.replace("_", "-")}="{clean(shown)}"')
    return "".join(parts)
