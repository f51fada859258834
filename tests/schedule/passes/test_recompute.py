import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import (
    Costs,
    fill_drain,
    one_forward_one_backward,
    simulate,
    spread_evenly,
    validate,
    with_recompute,
    without_recompute,
)


def test_stands_right_before_each_checkpointed_backward():
    schedule = with_recompute(fill_drain(2, 3), 2)
    assert [" ".join(map(str, order)) for order in schedule.orders] == [
        "0F0 0F1 0F2 0R0 0B0 0R1 0B1 0B2",
        "1F0 1F1 1F2 1R0 1B0 1R1 1B1 1B2",
    ]
    assert schedule.name == "gpipe"


@pytest.mark.parametrize("checkpointed", [-1, 4, True, 1.0, None, [{0}], [{0}, {3}]])
def test_refuses_what_is_out_of_range(checkpointed):
    with pytest.raises(ValueError, match="from 0 to 3, or for each of the 2 stages some of the micro-batches 0 to 2"):
        with_recompute(fill_drain(2, 3), checkpointed)


def test_what_is_differentiated_at_once_is_not_checkpointed():
    schedule = with_recompute(one_forward_one_backward(2, 3), 3)
    assert [" ".join(map(str, order)) for order in schedule.orders] == [
        "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]
    costs = Costs(activation=10, checkpoint_activation=1)
    assert simulate(schedule, costs).peak_memory == (11, 10)
    assert simulate(with_recompute(one_forward_one_backward(2, 3), 3, loss_outside=True), costs).peak_memory == (11, 10)


@given(workers=st.integers(1, 5), micro_batches=st.integers(1, 6), data=st.data())
def test_each_stage_has_its_own(workers, micro_batches, data):
    chosen = [data.draw(st.sets(st.integers(0, micro_batches - 1))) for _ in range(workers)]
    plain = fill_drain(workers, micro_batches)
    schedule = with_recompute(plain, chosen)
    assert validate(schedule).ok
    assert without_recompute(schedule).orders == plain.orders
    again = {(action.stage, action.micro_batch) for order in schedule.orders for action in order if action.kind == "R"}
    # With one micro-batch the backward of each stage directly follows its forward.
    at_once = {(stage, 0) for stage in range(workers) if micro_batches == 1}
    assert again == {(stage, each) for stage, some in enumerate(chosen) for each in some} - at_once


@given(micro_batches=st.integers(1, 40), data=st.data())
def test_spread_evenly(micro_batches, data):
    count = data.draw(st.integers(0, micro_batches))
    chosen = spread_evenly(count, micro_batches)
    assert len(chosen) == count
    for width in range(1, micro_batches + 1):  # each window has its share, up to one
        for first in range(micro_batches - width + 1):
            assert abs(len(chosen & set(range(first, first + width))) - count * width / micro_batches) < 1
