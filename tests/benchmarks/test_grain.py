"""The curves of `grain`: where they cross a level."""

import math

import pytest

from benchmarks.grain import run
from benchmarks.grain.plot import Curve, parts


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
