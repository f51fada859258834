import math

import pytest

from pipework.schedule import Action, Interval, Timeline


def line(*rows):
    return Timeline(
        tuple(
            Interval(worker, Action("F", worker, index), start, end, memory=10.0 * index)
            for worker, row in enumerate(rows)
            for index, (start, end) in enumerate(row)
        ),
        workers=len(rows),
    )


def test_measures():
    two = line([(1, 2), (4, 6)], [(3, 7)])
    assert (two.start, two.end, two.makespan) == (1, 7, 6)
    assert (two.busy(0), two.busy(1)) == (3, 4)
    assert two.bubble == pytest.approx(1 - 7 / 12)
    assert two.span == 5
    assert two.span_bubble == pytest.approx(1 - 7 / 10)
    assert (two.peak_memory(0), two.peak_memory(1)) == (10, 0)
    assert two.knows_memory
    assert not line([(0, 1)]).knows_memory


def test_rows_are_in_order_of_time():
    first, second = Interval(0, Action("F", 0, 1), 0, 1), Interval(0, Action("F", 0, 0), 1, 2)
    assert Timeline((second, first), workers=2).by_worker == ((first, second), ())


def test_normalised():
    moved = line([(3, 5)], [(4, 6)]).normalised()
    assert [(each.start, each.end) for each in moved.intervals] == [(0, 2), (1, 3)]
    assert moved.normalised() is moved


def test_empty():
    empty = Timeline((), workers=2)
    assert (empty.makespan, empty.span, empty.bubble, empty.span_bubble, empty.peak_memory(1)) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize(("start", "end"), [(1, 0), (math.nan, 1), (0, math.nan)])
def test_refuses_impossible_times(start, end):
    with pytest.raises(ValueError, match="ends before it starts"):
        line([(start, end)])


def test_refuses_unknown_workers():
    with pytest.raises(ValueError, match="the timeline has the workers 0 to 0"):
        Timeline((Interval(1, Action("F", 0, 0), 0, 1),), workers=1)
    with pytest.raises(ValueError, match="worker is 2, but this timeline has the workers 0 to 1"):
        Timeline((), workers=2).memory_steps(2)
    with pytest.raises(ValueError, match="at least one worker"):
        Timeline((), workers=0)
