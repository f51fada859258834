import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import Action, Costs, Schedule, build, list_schedule, simulate, validate
from pipework.schedule.generators.orders import Hops, v_pattern
from pipework.schedule.placement import loop_placement, wave_placement


def actions(text):
    return [Action.parse(word) for word in text.split()]


def shown(orders):
    return [" ".join(map(str, order)) for order in orders]


def test_priorities_wait_for_data_and_weights_fill_the_gaps():
    priorities = [actions("0F0 0F1 0I0 0I1"), actions("1F0 1I0 1F1 1I1")]
    assert shown(list_schedule((0, 1), priorities, limit=2)) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]


def test_memory_forces_weights():
    priorities = [actions("0F0 0I0 0F1 0I1 0F2 0I2")]
    assert shown(list_schedule((0,), priorities, limit=1)) == ["0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"]
    assert shown(list_schedule((0,), priorities, limit=3)) == ["0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"]


def test_who_may_overtake():
    # Worker 0 would rather wait for the gradient of micro-batch 0 than begin micro-batch 1.
    priorities = [actions("0F0 0B0 0F1 0B1"), actions("1F0 1B0 1F1 1B1")]
    assert shown(list_schedule((0, 1), priorities, limit=2))[0] == "0F0 0B0 0F1 0B1"
    assert shown(list_schedule((0, 1), priorities, limit=2, overtaking="backwards"))[0] == "0F0 0B0 0F1 0B1"
    assert shown(list_schedule((0, 1), priorities, limit=2, overtaking="all"))[0] == "0F0 0F1 0B0 0B1"
    # A slow worker 1: its gradient is there before worker 0 has come to the last of its forwards.
    priorities = [actions("0F0 0F1 0F2 0B0 0B1 0B2"), actions("1F0 1B0 1F1 1B1 1F2 1B2")]
    slow = Costs(forward=[4, 1], transfer=0.5)
    assert shown(list_schedule((0, 1), priorities, 2, slow, overtaking="backwards"))[0] == "0F0 0F1 0B0 0F2 0B1 0B2"
    with pytest.raises(ValueError, match="6 actions never start if a worker may hold 2 activations; raise the limit"):
        list_schedule((0, 1), priorities, 2, slow)


def test_the_banker_keeps_room_for_what_has_begun():
    # Both stages on one worker: two micro-batches on stage 0 would leave no room for stage 1.
    priorities = [actions("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1")]
    assert shown(list_schedule((0, 0), priorities, 2, overtaking="all")) == ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]
    with pytest.raises(ValueError, match="deadlock"):
        list_schedule((0, 0), priorities, 2)


numbers = st.integers(1, 5)


@given(numbers, numbers, st.integers(1, 8), st.integers(0, 20), st.randoms(use_true_random=False))
def test_any_priorities_are_free_of_deadlock(p, v, m, more, random):
    """With overtaking, any priorities at all give a valid schedule within the limit."""
    placement = loop_placement(p, v) if v % 2 else wave_placement(p, v)
    limit = v + more
    priorities = []
    for worker in range(p):
        lanes = [
            [Action(kind, stage, i) for i in range(m)]
            for stage in range(p * v)
            if placement[stage] == worker
            for kind in ("F", random.choice("IB"))
        ]
        order = [lane for lane in lanes for _ in range(m)]
        random.shuffle(order)
        fronts = {id(lane): iter(lane) for lane in lanes}
        priorities.append([next(fronts[id(lane)]) for lane in order])
    costs = Costs(forward=[random.uniform(0.1, 3) for _ in placement], transfer=random.choice([0, 0.7]))
    schedule = Schedule("any", placement, list_schedule(placement, priorities, limit, costs, overtaking="all"))
    validation = validate(schedule)
    assert validation.ok
    assert validation.ascending
    assert max(simulate(schedule, costs).peak_memory) <= limit


def test_fifty_thousand_actions_are_ordered():
    priorities = v_pattern(32, 256, Hops(down=2, back=2, turn=3, loss=4))
    orders = list_schedule(wave_placement(32, 2), priorities, 34, overtaking="backwards")
    assert sum(map(len, orders)) == 49_152


def test_actions_that_take_no_time():
    """Data may come at the very moment at which a worker has looked and found nothing."""
    for name in ("zb-v", "v-half", "v-min", "hanayo", "interleaved-zb"):
        for zero in ({"forward": 0}, {"input_gradient": 0, "weight_gradient": 0}, {"forward": 0, "backward": 0}):
            costs = Costs(**zero)
            assert validate(build(name, workers=4, chunks=6, costs=costs), costs).ok
