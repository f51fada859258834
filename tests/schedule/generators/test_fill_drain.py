import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import Action, Costs, fill_drain, simulate, validate


def test_orders_are_a_parallelogram():
    # One column per unit of time, one row per worker, at equal costs.
    expected = """
        0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
         .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
         .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .
    """
    rows = [line.split() for line in expected.strip().splitlines()]
    schedule = fill_drain(workers=3, micro_batches=4)
    assert schedule.orders == tuple(tuple(Action.parse(cell) for cell in row if cell != ".") for row in rows)

    columns = {
        (interval.worker, int(interval.start)): str(interval.action)
        for interval in simulate(schedule, Costs(backward=1)).timeline.intervals
    }
    drawn = [[columns.get((worker, column), ".") for column in range(12)] for worker in range(3)]
    assert drawn == rows


@given(workers=st.integers(1, 12), micro_batches=st.integers(1, 12))
def test_valid_ascending_and_one_stage_a_worker(workers, micro_batches):
    schedule = fill_drain(workers, micro_batches)
    validation = validate(schedule)
    assert validation.ok
    assert validation.ascending
    assert schedule.name == "gpipe"
    assert schedule.placement == tuple(range(workers))
    assert (schedule.workers, schedule.micro_batches) == (workers, micro_batches)
    assert sum(map(len, schedule.orders)) == 2 * workers * micro_batches


@pytest.mark.parametrize(
    ("workers", "micro_batches", "name"), [(0, 4, "workers"), (4, 0, "micro_batches"), (-1, 4, "workers")]
)
def test_refuses_too_few(workers, micro_batches, name):
    with pytest.raises(ValueError, match=rf"^{name} is (0|-1): wanted an integer of at least 1"):
        fill_drain(workers, micro_batches)


@pytest.mark.parametrize("value", [2.0, "2", True, None])
def test_refuses_other_types(value):
    with pytest.raises(TypeError, match=r"^workers is "):
        fill_drain(value, 4)
    with pytest.raises(TypeError, match=r"^micro_batches is "):
        fill_drain(4, value)
