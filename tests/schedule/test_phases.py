import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import Action, Schedule, fill_drain, split_at_loss, validate, with_recompute


def orders(text):
    return tuple(tuple(map(Action.parse, line.split())) for line in text.strip().splitlines())


def test_cuts_before_the_first_action_that_is_no_forward():
    fill, drain = split_at_loss(with_recompute(fill_drain(2, 2), 1))
    assert fill == orders("0F0 0F1\n1F0 1F1")
    assert drain == orders("0R0 0B0 0B1\n1R0 1B0 1B1")


@given(workers=st.integers(1, 5), micro_batches=st.integers(1, 5))
def test_phases_together_are_the_schedule(workers, micro_batches):
    schedule = fill_drain(workers, micro_batches)
    fill, drain = split_at_loss(schedule)
    assert tuple(first + second for first, second in zip(fill, drain, strict=True)) == schedule.orders
    assert {action.kind for order in fill for action in order} == {"F"}
    assert "F" not in {action.kind for order in drain for action in order}


def test_refuses_a_forward_after_a_backward():
    one_f_one_b = Schedule("1f1b", (0, 1), orders("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"))
    assert validate(one_f_one_b).ok
    with pytest.raises(ValueError, match=r"'1f1b' runs the forward 1F1 on worker 1 after 1B0.*loss inside"):
        split_at_loss(one_f_one_b)
