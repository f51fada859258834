"""The curves of `grain`: where they cross a level, and how they are drawn."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.grain import run
from benchmarks.grain.plot import Curve, draw, parts

SVG = "{http://www.w3.org/2000/svg}"


def test_a_curve_crosses_a_level_on_a_straight_line_over_the_logarithm() -> None:
    curve = [(0.1, 0.1), (1.0, 0.5), (10.0, 0.9)]
    assert run.crossing(curve, 0.3) == pytest.approx(math.sqrt(0.1))
    assert run.crossing(curve, 0.05) == 0.1
    assert run.crossing(curve, 0.95) == math.inf


def test_a_curve_that_falls_again_has_crossed_only_the_last_time() -> None:
    assert run.crossing([(1.0, 0.8), (10.0, 0.2), (100.0, 0.8)], 0.5) == pytest.approx(math.sqrt(1000))
    assert run.Line(run.SLEEPING, 2).speed_up("gpipe", 16) == pytest.approx(2 * 16 / 17)


def test_segments_are_cut_at_the_level() -> None:
    curve = Curve("c", [(1.0, 0.2), (100.0, 0.6), (200.0, 0.7)], level=0.4)
    assert [([(round(x, 6), y) for x, y in points], pays) for points, pays in parts(curve)] == [
        ([(1.0, 0.2), (10.0, 0.4)], False),
        ([(10.0, 0.4), (100.0, 0.6)], True),
        ([(100.0, 0.6), (200.0, 0.7)], True),
    ]


def test_picture_has_a_panel_for_each_schedule_and_dashes_where_a_pipe_does_not_pay() -> None:
    curve = Curve("a < b", [(0.1, 0.1), (1.0, 0.9)], level=0.5)
    picture = ElementTree.fromstring(draw({"gpipe": [curve], "1f1b": [curve]}))
    panels = picture.findall(f"{SVG}g")
    assert len(panels) == 2
    for panel in panels:
        paths = [path for path in panel.iter(f"{SVG}path") if path.get("fill") == "none"]
        assert [path.get("stroke-dasharray") is None for path in paths] == [False, True]
        assert len(list(panel.iter(f"{SVG}circle"))) == 2
    words = [mark.text for mark in picture.iter(f"{SVG}text")]
    assert {"gpipe", "1f1b", "a < b", "0.1", "1", "100%"} <= set(words)


@pytest.mark.thorough
def test_picture_is_drawn_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "curves.svg"
    run.main(["--seconds", "0.01", "--milliseconds", "0.2", "1", "--micro-batches", "2", "--plot", str(path)])
    assert ElementTree.fromstring(path.read_text(encoding="utf-8")).tag == f"{SVG}svg"
