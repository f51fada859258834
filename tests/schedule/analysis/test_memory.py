import math

import pytest

from pipework.schedule import Costs, ScheduleError, fill_drain, forward_only, simulate, validate, with_recompute, zb_h1
from pipework.schedule.analysis.memory import amounts, each_limit


def most(schedule, costs):
    return [list(amounts(schedule, order, costs.spread(schedule.stages))[0]) for order in schedule.orders]


def test_activations_are_held_from_the_forward_to_the_end_of_the_weight_half():
    #                                     0F0 0F1 0I0 0W0 0I1 0W1
    assert most(zb_h1(2, 2), Costs())[0] == [1, 2, 2, 2, 1, 1]


def test_a_checkpointed_micro_batch_holds_little_until_it_is_recomputed():
    schedule = with_recompute(fill_drain(1, 2), 1)
    #                                                                 0F0 0F1  0R0  0B0  0B1
    assert most(schedule, Costs(activation=4, checkpoint_activation=1)) == [[4, 5, 8, 8, 4]]


def test_inference_holds_one_at_a_time():
    assert most(forward_only(1, 3), Costs()) == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        ([1, 2, 3], ValueError, "memory_limit has 3 numbers: wanted 2, one for each worker"),
        ([1, -2], ValueError, "memory_limit of worker 1 is -2: wanted a number of at least 0"),
        (math.nan, ValueError, "memory_limit of worker 0 is nan"),
        ("much", TypeError, "memory_limit of worker 0 is 'much': wanted a number"),
        (True, TypeError, "memory_limit of worker 0 is True"),
    ],
)
def test_impossible_limits(limit, error, message):
    with pytest.raises(error, match=message):
        each_limit(limit, 2)
    with pytest.raises(error, match=message):
        validate(fill_drain(2, 2), memory_limit=limit)


def test_a_limit_is_not_missed_by_rounding():
    assert validate(fill_drain(1, 3), Costs(activation=0.1), memory_limit=0.3).ok
    assert not validate(fill_drain(1, 3), Costs(activation=0.1), memory_limit=0.29).ok


def test_the_first_action_over_the_limit_is_named():
    found = validate(fill_drain(2, 4), memory_limit=[4, 2])
    assert [each.message for each in found.violations] == ["worker 1 holds 3 at 1F2, more than its limit of 2"]
    with pytest.raises(ScheduleError, match="worker 0 holds 3 at 0F2, more than its limit of 2"):
        simulate(fill_drain(2, 4), memory_limit=2)
    assert validate(fill_drain(2, 4), memory_limit=4).ok
