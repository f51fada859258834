import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    build,
    fill_drain,
    interleaved_1f1b,
    one_forward_one_backward,
    restricted,
    validate,
)

F, B = Action("F", 0, 0), Action("B", 0, 0)


def test_is_an_immutable_value():
    assert hash(Schedule("s", [0], [[F, B]])) == hash(Schedule("s", (0,), ((F, B),)))
    with pytest.raises(ValueError, match="worker is 2, but this schedule has the workers 0 to 1"):
        fill_drain(2, 3).stages_of(2)
    one, other = fill_drain(2, 3), fill_drain(2, 3)
    assert one == other
    assert len({one, other, fill_drain(2, 2)}) == 2
    assert one.micro_batches == 3  # cached; must neither break equality nor pickling
    assert pickle.loads(pickle.dumps(one)) == other
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "other"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, (0,), ((F, B),)), TypeError, "name of a schedule is 3"),
        (("s", (), ((F, B),)), ValueError, "placement is empty"),
        (("s", (0,), ()), ValueError, "stage 0 is placed on worker 0: .*; there are orders for 0 workers"),
        (("s", (0,), ((),)), ValueError, "no action at all"),
        (("s", ("0",), ((F, B),)), TypeError, "placement of stage 0 is '0'"),
        (("s", (True,), ((F, B),)), TypeError, "placement of stage 0 is True"),
        (("s", (1,), ((F, B),)), ValueError, "stage 0 is placed on worker 1: .*; there are orders for 1 workers"),
        (("s", (-1,), ((F, B),)), ValueError, "stage 0 is placed on worker -1"),
        (("s", (0,), ((F, B), ())), ValueError, "worker 1 holds no stage: place a stage on it, or leave its order out"),
        (("s", (0,), ((F, B),), False, [(0, 1)]), ValueError, "a skip goes from stage 0 to stage 1: wanted each pair"),
        (("s", (0, 0, 0), ((F, B),), False, [(0, 2), (0, 2)]), ValueError, "wanted each pair once"),
    ],
)
def test_constructor_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        Schedule(*arguments)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (("F", 0, 4999), TypeError, r"\('F', 0, 4999\) in worker 0's order: wanted an Action"),
        (Action("F", 0, True), TypeError, "wanted an Action"),
        (Action("F", [0], 1), TypeError, "wanted an Action"),
        (Action("B", 0, 1.0), TypeError, "wanted an Action"),
        (Action("G", 0, 1), ValueError, "kind must be one of F, B"),
        (Action("F", 1, 1), ValueError, "1F1 in worker 0's order: placement has the stages 0 to 0"),
        (Action("F", -1, 1), ValueError, "placement has the stages 0 to 0"),
        (Action("F", 0, -1), ValueError, "F wants a micro-batch from 0 on, and no peer"),
        (Action("F", 0, 1, 0), ValueError, "F wants a micro-batch from 0 on, and no peer"),
        (Action("SEND_F", 0, 1), ValueError, "SEND_F wants a micro-batch from 0 on, and a peer from 0 to 0"),
        (Action("UNSHARD", 0, 1), ValueError, "UNSHARD wants no micro-batch, and no peer"),
    ],
)
def test_a_fault_is_found_at_the_end_of_a_long_order(wrong, error, message):
    order = [Action("F", 0, number) for number in range(4999)]
    with pytest.raises(error, match=message):
        Schedule("long", (0,), ([*order, wrong],))
    assert Schedule("long", (0,), (order,)).micro_batches == 4999


def test_the_first_micro_batches_stay_in_their_order():
    schedule = restricted(interleaved_1f1b(2, 4, 2), 1)
    assert (schedule.name, schedule.placement, schedule.micro_batches) == ("interleaved-1f1b", (0, 1, 0, 1), 1)
    assert [[str(action) for action in order] for order in schedule.orders] == [
        ["0F0", "2F0", "2B0", "0B0"],
        ["1F0", "3F0", "3B0", "1B0"],
    ]


@given(
    name=st.sampled_from(sorted(SCHEDULES)), workers=st.integers(1, 5), micro_batches=st.integers(1, 9), data=st.data()
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
