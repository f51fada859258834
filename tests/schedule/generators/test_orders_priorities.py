import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import Action
from pipework.schedule.generators.orders import Hops, numbered, v_pattern
from pipework.schedule.placement import wave_placement


def test_surplus_steps_are_dropped():
    steps = [("F", 0), ("I", 0), ("F", 1)] * 3
    assert " ".join(map(str, numbered(steps, 2))) == "0F0 0I0 1F0 0F1 0I1 1F1"


@pytest.mark.parametrize("backward", ["B", "I"])
@given(st.integers(1, 6), st.integers(1, 5), st.builds(Hops, *[st.integers(1, 4)] * 7))
def test_a_pattern_has_each_action_once_on_its_worker(backward, workers, micro_batches, hops):
    placement = wave_placement(workers, 2)
    for worker, order in enumerate(v_pattern(workers, micro_batches, hops, backward=backward)):
        expected = [
            Action(kind, stage, micro_batch)
            for stage, home in enumerate(placement)
            if home == worker
            for kind in ("F", backward)
            for micro_batch in range(micro_batches)
        ]
        assert sorted(order) == sorted(expected)
        for micro_batch in range(micro_batches):
            own = [action for action in order if action.micro_batch == micro_batch]
            assert [action.kind for action in own] == ["F", "F", backward, backward]


def test_a_pattern_is_in_the_order_of_time():
    hops = Hops(down=2, turn=3, loss=4, back=2)
    start = {("F", 0): 0, ("F", 1): 2, ("F", 2): 5, ("F", 3): 6, ("I", 3): 10, ("I", 2): 12, ("I", 1): 13, ("I", 0): 14}
    for worker, order in enumerate(v_pattern(2, 7, hops)):
        lanes = [lane for lane in start if lane[1] in (worker, 3 - worker)]
        timed = [(start[lane] + 6 * number, *lane, number) for lane in lanes for number in range(7)]
        assert [action[:3] for action in order] == [lane[1:] for lane in sorted(timed)]


def test_calls_may_share_the_objects_of_numbers():
    numbers = list(range(300))
    found = [numbered([("F", stage)] * 400, 300, numbers) for stage in range(2)]
    assert found[0] == [Action("F", 0, number) for number in range(300)]
    assert all(action.micro_batch is number for row in found for action, number in zip(row, numbers, strict=True))
