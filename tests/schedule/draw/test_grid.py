import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipework.schedule import Action, Costs, Interval, Timeline, fill_drain, grid, simulate, with_recompute


def drawn(schedule, costs=None, **options):
    return grid(simulate(schedule, costs).timeline, **options)


def test_one_column_per_unit():
    assert drawn(with_recompute(fill_drain(3, 2), 1), Costs(backward=1)).splitlines() == [
        "worker 0  0F0 0F1 0R0  .   .   .   .  0B0 0B1",
        "worker 1   .  1F0 1F1 1R0  .   .  1B0 1B1  .",
        "worker 2   .   .  2F0 2F1 2R0 2B0 2B1  .   .",
    ]


def test_uneven_times_are_scaled():
    lines = drawn(fill_drain(2, 2), Costs(forward=[1, 1.3], backward=2.1), max_width=60).splitlines()
    assert [len(line) for line in lines] == [60 - 1, 60]  # the last blank of a cell is cut off
    assert lines[0].startswith("worker 0  0F0- 0F1- ...")
    assert lines[1].startswith("worker 1  .....1F0--- 1F1-- 1B0")


def test_starts_at_the_first_interval():
    late = Timeline((Interval(0, Action("F", 0, 0), 100, 101), Interval(0, Action("F", 0, 1), 102, 103)), workers=1)
    assert grid(late) == "worker 0  0F0  .  0F1"


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 30), st.floats(0.01, 3), st.integers(40, 200))
def test_never_wider_than_told_and_all_names_of_one_form(workers, micro_batches, backward, max_width):
    lines = drawn(fill_drain(workers, micro_batches), Costs(backward=backward), max_width=max_width).splitlines()
    assert len(lines) == workers
    assert max(map(len, lines)) <= max_width
    text = " ".join(line[len("worker 0  ") :] for line in lines)
    assert any(re.fullmatch(form, text) for form in (r"(\d+[FB]\d+-*|[. ])*", r"([FB]\d+-*|[. ])*", r"([FB]-*|[. ])*"))


def test_nothing_to_draw():
    said = "nothing to draw: no action takes any time"
    assert grid(Timeline((), workers=2), max_width=40) == said
    instant = Timeline((Interval(0, Action("F", 0, 0), 1, 1),), workers=1)
    assert grid(instant, max_width=40) == said
    assert drawn(fill_drain(2, 2), Costs(0, 0)) == said


def test_refuses_a_width_without_room():
    with pytest.raises(ValueError, match="max_width is 39: wanted at least 40"):
        drawn(fill_drain(1, 1), max_width=39)
