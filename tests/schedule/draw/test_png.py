import struct
import sys
from io import BytesIO
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageColor

from pipework.schedule import Action, Costs, Interval, Schedule, Timeline, build, fill_drain, simulate, svg
from pipework.schedule.draw.palette import ACTION, MEMORY, action_fill, worker_fill
from pipework.timeline import png

matplotlib = pytest.importorskip("matplotlib")


def predicted(workers, micro_batches, **costs):
    return simulate(fill_drain(workers, micro_batches), Costs(**costs)).timeline


def decoded(picture):
    with Image.open(BytesIO(picture)) as image:
        return image.convert("RGB")


def colors(image):
    return {color for _, color in image.getcolors(1 << 24)}


def cells(line, **options):
    """(tooltip, rectangle's attributes) of each cell of the SVG picture."""
    for group in ElementTree.fromstring(svg(line, **options)).iter("{http://www.w3.org/2000/svg}g"):
        title = group.find("{http://www.w3.org/2000/svg}title")
        if title is not None:
            yield title.text, group.find("{http://www.w3.org/2000/svg}rect").attrib


def rgb(color):
    return ImageColor.getrgb(color)


@pytest.mark.parametrize("scale", [0.5, 1, 2.0, 3.3])
def test_it_is_a_png_of_the_size_of_the_svg(scale):
    line = predicted(3, 2)
    picture = png(line, scale=scale)
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    root = ElementTree.fromstring(svg(line))
    size = tuple(round(float(root.get(side)) * scale) for side in ("width", "height"))
    assert struct.unpack(">II", picture[16:24]) == size


def test_cells_are_where_those_of_the_svg_are():
    line = predicted(4, 4)
    image = decoded(png(line))
    found = list(cells(line))
    assert len(found) == 32
    for title, box in found:
        x, y = (2 * float(box[name]) for name in ("x", "y"))
        color = rgb(ACTION["F" if title.startswith("forward") else "B"])
        assert image.getpixel((x + 5, y + 5)) == color, title
        assert image.getpixel((x + 2 * float(box["width"]) - 5, y + 2 * float(box["height"]) - 5)) == color, title


def test_idle_time_is_white_and_worker_0_on_top():
    line = predicted(4, 4)
    image = decoded(png(line))
    boxes = {title.split(":")[0]: box for title, box in cells(line)}
    first, last = (boxes[f"forward of stage {stage}, micro-batch 0"] for stage in (0, 3))
    x = 2 * float(first["x"]) + 20
    assert image.getpixel((x, 2 * float(first["y"]) + 5)) == rgb(ACTION["F"])
    assert image.getpixel((x, 2 * float(last["y"]) + 5)) == (255, 255, 255)
    assert float(first["y"]) < float(last["y"])


def test_every_kind_has_its_color():
    order = tuple(map(Action.parse, ("0F0", "1F0", "1B0", "0R0", "0I0", "0W0", "0F1", "1F1", "1B1", "0B1")))
    line = simulate(Schedule("kinds", (0, 0), (order,))).timeline
    there = colors(decoded(png(line, update=True)))
    wanted = {*ACTION.values(), action_fill("F", 1), action_fill("B", 1), MEMORY}
    assert {rgb(color) for color in wanted} <= there
    assert rgb(MEMORY) not in colors(decoded(png(line, memory=False)))


def test_the_look_of_one_color_a_worker():
    for micro_batches in (1, 4):  # an arrow of time, and a bubble
        there = colors(decoded(png(predicted(4, micro_batches), colors="worker", update=True)))
        assert {rgb(worker_fill(worker)) for worker in range(4)} <= there
        assert rgb(ACTION["F"]) not in there


@pytest.mark.thorough
def test_labels_can_be_left_out():
    line = predicted(2, 2)
    boxes = list(cells(line))

    def inside(image):
        for _, box in boxes:
            x, y, width, height = (2 * float(box[name]) for name in ("x", "y", "width", "height"))
            yield len(colors(image.crop((round(x) + 3, round(y) + 3, round(x + width) - 3, round(y + height) - 3))))

    assert set(inside(decoded(png(line, labels="none")))) == {1}
    assert min(inside(decoded(png(line)))) > 1


def test_timelines_above_each_other():
    slow = predicted(2, 2, forward=2, backward=4)
    one, both = decoded(png(slow)), decoded(png([predicted(2, 2), slow]))
    assert both.height > one.height + 100


def test_units_are_told():
    def line(unit):
        return Timeline((Interval(0, Action("F", 0, 0), 0.0, 0.25),), 1, unit=unit)

    assert png(line("s")) != png(line(""))


def test_the_same_timeline_is_the_same_picture_whatever_the_settings():
    line = predicted(2, 2)
    picture = png(line)
    with matplotlib.rc_context(
        {"font.family": "serif", "text.usetex": True, "savefig.dpi": 10, "figure.facecolor": "red"}
    ):
        assert png(line) == picture
    assert "matplotlib.pyplot" not in sys.modules


def test_titles_are_no_formulas():
    schedule = Schedule("costs $x$ of a_b \\$ & <c>\n\x00", (0,), fill_drain(1, 1).orders)
    assert decoded(png(simulate(schedule).timeline)).width > 100


@pytest.mark.thorough
def test_a_large_timeline_is_drawn():
    line = simulate(build("1f1b", workers=64, chunks=512)).timeline
    there = colors(decoded(png(line, scale=1)))
    assert rgb(ACTION["F"]) in there
    assert rgb(MEMORY) in there


@pytest.mark.parametrize("line", [Timeline((), 2), Timeline((Interval(0, Action("F", 0, 0), 1, 1),), 1)])
def test_an_empty_timeline_can_be_drawn(line):
    assert decoded(png(line, colors="worker", update=True)).width > 100


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([], {}, "no timeline was given"),
        ([Timeline((), 1), Timeline((), 1, unit="s")], {}, "have no common axis"),
        (Timeline((), 1), {"colors": "stage"}, "colors is 'stage': wanted one of 'action', 'worker'"),
        (Timeline((), 1), {"labels": "all"}, "labels is 'all': wanted one of"),
        (Timeline((), 1), {"scale": 0}, "scale is 0: wanted a finite number above 0"),
        (Timeline((), 1), {"scale": float("nan")}, "scale is nan: wanted a finite number above 0"),
    ],
)
def test_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        png(arguments, **options)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib, .*: pip install '\.\[plot\]'"):
        png(predicted(1, 1))
