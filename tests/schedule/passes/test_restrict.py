import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import SCHEDULES, build, interleaved_1f1b, one_forward_one_backward, restricted, validate


def test_the_first_micro_batches_stay_in_their_order():
    schedule = restricted(interleaved_1f1b(2, 4, 2), 1)
    assert (schedule.name, schedule.placement, schedule.micro_batches) == ("interleaved-1f1b", (0, 1, 0, 1), 1)
    assert [[str(action) for action in order] for order in schedule.orders] == [
        ["0F0", "2F0", "2B0", "0B0"],
        ["1F0", "3F0", "3B0", "1B0"],
    ]


def test_all_of_them_are_the_same_schedule():
    schedule = one_forward_one_backward(3, 4)
    assert restricted(schedule, 4) is schedule


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    workers=st.integers(1, 5),
    micro_batches=st.integers(1, 9),
    data=st.data(),
)
def test_a_part_of_a_valid_schedule_is_valid(name, workers, micro_batches, data):
    schedule = build(name, workers=workers, chunks=micro_batches)
    left = data.draw(st.integers(1, micro_batches))
    part = restricted(schedule, left)
    validation = validate(part)
    assert validation.ok
    assert validation.ascending
    assert part.micro_batches == left
    kept = {action for order in schedule.orders for action in order if action.micro_batch < left}
    assert {action for order in part.orders for action in order} == kept


@pytest.mark.parametrize("count", [0, -1, 5, 1.0, "2", True, None])
def test_other_numbers_are_refused(count):
    with pytest.raises(ValueError, match="wanted an integer from 1 to the 4 of the schedule"):
        restricted(one_forward_one_backward(2, 4), count)
