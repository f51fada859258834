"""Timelines as a PNG picture: matplotlib paints the elements of the picture that svg() makes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree

from pipework.schedule import Timeline, svg
from pipework.schedule.draw.palette import PAPER

if TYPE_CHECKING:
    from matplotlib.path import Path

    from pipework.schedule.draw.svg import Colors, Labels

# The font of matplotlib is wider than the fonts that svg() assumes.
_FONT, _FONT_SIZE = "DejaVu Sans", 0.88


def png(
    timelines: Timeline | Sequence[Timeline],
    *,
    colors: Colors = "action",
    update: bool = False,
    labels: Labels | None = None,
    memory: bool | None = None,
    scale: float = 2.0,
) -> bytes:
    """Draw timelines above each other as :func:`pipework.schedule.svg` does, as a PNG picture.

    This needs matplotlib (the extra ``plot``), but no display; it does not use pyplot or its settings.

    Args:
        timelines: one or several, all in the same unit; each is drawn from its own start.
        colors: as for ``svg()``.
        update: as for ``svg()``.
        labels: as for ``svg()``.
        memory: as for ``svg()``.
        scale: the number of pixels, in each direction, for a pixel of the SVG picture.

    Returns:
        The content of a PNG file.

    Raises:
        ValueError: an argument that ``svg()`` refuses, or a ``scale`` that is not above 0.
        ImportError: matplotlib is not installed.

    Example:
        >>> from pipework.schedule import fill_drain, simulate
        >>> png(simulate(fill_drain(2, 2)).timeline)[1:4]
        b'PNG'
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale!r}: wanted a finite number above 0, such as 2.0")
    picture = ElementTree.fromstring(svg(timelines, colors=colors, update=update, labels=labels, memory=memory))
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise ImportError(
            "a PNG picture needs matplotlib, which cannot be imported: pip install '.[plot]' in pipework's checkout, "
            "or draw an SVG picture"
        ) from error
    shapes = list(_shapes(picture, {}, _Letters()))
    return _painted(shapes, float(picture.attrib["width"]), float(picture.attrib["height"]), scale)


class _Shape(NamedTuple):
    """An outline, in the coordinates of the SVG picture, and its paint."""

    path: Path
    fill: str
    stroke: str = "none"
    stroke_width: float = 0.0


class _Letters:
    """Outlines of texts; each is made once, because most are the same few numbers of micro-batches."""

    def __init__(self) -> None:
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import TextToPath

        # All properties are given, so that a user's settings have no effect.
        self._fonts = {
            weight: FontProperties(family=_FONT, style="normal", variant="normal", weight=weight, stretch="normal")
            for weight in ("normal", "bold")
        }
        self._maker = TextToPath()
        self._known: dict[tuple[str, str], tuple[Path, float]] = {}

    def outline(self, content: str, weight: str) -> tuple[Path, float]:
        """The outline of a text in size 1, to the right of the origin, with y downwards; and its width."""
        from matplotlib.path import Path

        known = self._known.get((content, weight))
        if known is None:
            points, codes = self._maker.get_text_path(self._fonts[weight], content)
            size = _FONT_SIZE / self._maker.FONT_SCALE
            corners = [(float(x) * size, float(-y) * size) for x, y in points] or [(0.0, 0.0)]
            known = Path(corners, codes or [Path.MOVETO]), max(x for x, _ in corners)
            self._known[content, weight] = known
        return known


def _shapes(element: ElementTree.Element, inherited: Mapping[str, str], letters: _Letters) -> Iterator[_Shape]:
    """The shapes of an element of an SVG picture, in the order of painting."""
    style = {**inherited, **element.attrib}
    tag = element.tag.rpartition("}")[2]
    if tag in ("svg", "g"):
        for child in element:
            yield from _shapes(child, style, letters)
    elif tag == "text":
        yield from _text(element, style, letters)
    elif tag != "title":  # A title is a tooltip.
        path = {"rect": _rectangle, "polygon": _polygon, "path": _lines}[tag](element.attrib)
        yield _Shape(path, style["fill"], style.get("stroke", "none"), float(style.get("stroke-width", 1.0)))


def _text(element: ElementTree.Element, style: Mapping[str, str], letters: _Letters) -> Iterator[_Shape]:
    """A line of text, with its subscript if it has one."""
    from matplotlib.transforms import Affine2D

    y, width = float(style["y"]), 0.0
    pieces: list[tuple[Path, Affine2D]] = []
    for each in (element, *element):
        y += float(each.get("dy", 0.0))
        size, gap = float(each.attrib["font-size"]), 1.5 if pieces else 0.0
        outline, wide = letters.outline(" ".join((each.text or "").split()), style.get("font-weight", "normal"))
        pieces.append((outline, Affine2D().scale(size).translate(width + gap, y)))
        width += gap + wide * size
    left = float(style["x"]) - {"start": 0.0, "middle": 0.5, "end": 1.0}[style.get("text-anchor", "start")] * width
    for outline, place in pieces:
        yield _Shape(outline.transformed(place.translate(left, 0.0)), style["fill"])


def _rectangle(attributes: Mapping[str, str]) -> Path:
    from matplotlib.path import Path

    left, top, width, height = (float(attributes[name]) for name in ("x", "y", "width", "height"))
    right, bottom, round_ = left + width, top + height, float(attributes.get("rx", 0.0))
    if not round_:
        return _through([(left, top), (right, top), (right, bottom), (left, bottom)])
    corners = (
        ((left, top + round_), (left, top), (left + round_, top)),
        ((right - round_, top), (right, top), (right, top + round_)),
        ((right, bottom - round_), (right, bottom), (right - round_, bottom)),
        ((left + round_, bottom), (left, bottom), (left, bottom - round_)),
    )
    points = [point for corner in corners for point in corner]
    codes = [Path.LINETO, Path.CURVE3, Path.CURVE3] * 4
    return Path([*points, points[0]], [Path.MOVETO, *codes[1:], Path.CLOSEPOLY])


def _polygon(attributes: Mapping[str, str]) -> Path:
    pairs = (point.split(",") for point in attributes["points"].split())
    return _through([(float(x), float(y)) for x, y in pairs])


def _lines(attributes: Mapping[str, str]) -> Path:
    """A path of horizontal and vertical lines, the only ones in these pictures."""
    points: list[tuple[float, float]] = []
    closed = False
    for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", attributes["d"]):
        values = [float(each) for each in numbers.split()]
        match command, values:
            case "M", [x, y]:
                points.append((x, y))
            case "H", [x]:
                points.append((x, points[-1][1]))
            case "V", [y]:
                points.append((points[-1][0], y))
            case "v", [down]:
                points.append((points[-1][0], points[-1][1] + down))
            case "Z", []:
                closed = True
            case _:
                raise NotImplementedError(f"{command}{numbers} in a path: {__name__} paints only M, H, V, v and Z")
    return _through(points, closed=closed)


def _through(points: Sequence[tuple[float, float]], *, closed: bool = True) -> Path:
    from matplotlib.path import Path

    if not closed:
        return Path(points)
    return Path([*points, points[0]], [Path.MOVETO, *[Path.LINETO] * (len(points) - 1), Path.CLOSEPOLY])


def _painted(shapes: Sequence[_Shape], width: float, height: float, scale: float) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure
    from matplotlib.transforms import Affine2D

    # With 72 dots per inch, a point is a pixel.
    columns, rows, dots = max(1, round(width * scale)), max(1, round(height * scale)), 72 * scale
    figure = Figure(figsize=(columns / dots, rows / dots), dpi=dots, facecolor=PAPER, frameon=True)
    figure.add_artist(
        # One artist for all shapes: separate ones would take minutes for a large timeline.
        PathCollection(
            [shape.path for shape in shapes],
            facecolors=[shape.fill for shape in shapes],
            edgecolors=[shape.stroke for shape in shapes],
            linewidths=[shape.stroke_width for shape in shapes],
            capstyle="butt",
            joinstyle="miter",
            antialiaseds=True,
            snap=False,
            transform=Affine2D().scale(scale, -scale).translate(0.0, rows),
        )
    )
    content = BytesIO()
    # Without the version of matplotlib, the same picture has the same bytes.
    FigureCanvasAgg(figure).print_png(content, metadata={"Software": None})  # type: ignore[no-untyped-call]
    return content.getvalue()
