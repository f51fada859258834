import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import Action
from pipework.schedule.placement import wave_placement
from pipework.schedule.priorities import Hops, numbered, v_pattern


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
