import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipework.schedule import (
    SCHEDULES,
    Costs,
    ScheduleError,
    build,
    fill_drain,
    forward_only,
    looped_bfs,
    one_forward_one_backward,
    restricted,
    simulate,
    validate,
    with_communication,
    with_gradient_reduction,
    with_recompute,
    with_skips,
)
from tests.schedule.orders_text import schedule_of


def rows(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_sends_follow_their_actions_and_receives_come_one_action_early():
    assert rows(with_communication(one_forward_one_backward(2, 3))) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_skips_go_straight():
    lowered = with_communication(with_skips(fill_drain(3, 1), [(0, 2)]), channel="worker")
    assert rows(lowered) == [
        "0F0 0SEND_F0 0SEND_F0@2 0RECV_B0@2 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0@0 2RECV_F0 2F0 2B0 2SEND_B0 2SEND_B0@0",
    ]


times = st.sampled_from([0.0, 0.25, 1.0, 3.0])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.data())
def test_transfers_can_be_executed_whatever_the_costs_and_change_no_computation(name, workers, chunks, data):
    schedule = build(name, workers=workers, chunks=chunks)
    stages = st.integers(0, schedule.stages - 1)
    pairs = data.draw(st.lists(st.tuples(stages, stages).map(lambda pair: tuple(sorted(pair))), max_size=2))
    schedule = with_skips(schedule, pairs)
    costs = Costs(data.draw(times), None, None, data.draw(times), data.draw(times), transfer=data.draw(times))
    for channel, others in (("pair", ["unbounded"]), ("worker", ["unbounded", "pair"])):
        lowered = with_communication(schedule, costs, channel=channel)
        for each in [channel, *others]:
            assert validate(lowered, channel=each).ok
        computing = [tuple(action for action in order if action.peer < 0) for order in lowered.orders]
        assert tuple(computing) == schedule.orders
        assert simulate(lowered, costs, channel=channel).makespan >= simulate(schedule, costs).makespan - 1e-9
        fewer = restricted(lowered, 1)
        assert validate(fewer, channel="pair").ok


def test_skips_that_travel_with_a_value_or_not_at_all_are_left_out():
    assert with_skips(fill_drain(5, 1), [(0, 4), (1, 2), (3, 3), (1, 3), (0, 4)]).skips == ((0, 4), (1, 3))
    twice = with_skips(with_skips(fill_drain(4, 1), [(1, 3)]), [(0, 2)])
    assert twice.skips == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("skips", "error", "message"),
    [
        ([(2, 0)], ValueError, "a skip goes from stage 2 to stage 0: wanted two of the stages 0 to 3, the earlier"),
        ([(0, 4)], ValueError, "a skip goes from stage 0 to stage 4"),
        ([(0, 1, 2)], TypeError, r"a skip is \(0, 1, 2\): wanted a pair of stages"),
        ([3], TypeError, "a skip is 3: wanted a pair of stages"),
        ([("a", 3)], TypeError, "a skip is"),
        (3, TypeError, "skips is 3: wanted a sequence"),
    ],
)
def test_impossible_skips(skips, error, message):
    with pytest.raises(error, match=message):
        with_skips(fill_drain(4, 2), skips)


def test_reductions_stand_behind_the_last_gradient_and_what_it_sends():
    assert rows(with_gradient_reduction(looped_bfs(2, 1, 2))) == [
        "0F0 2F0 2B0 2REDUCE_GRAD 0B0 0REDUCE_GRAD",
        "1F0 3F0 3B0 3REDUCE_GRAD 1B0 1REDUCE_GRAD",
    ]
    both = with_gradient_reduction(with_communication(looped_bfs(2, 1, 2), channel="worker"))
    assert rows(both)[1].endswith("1B0 1SEND_B0 1REDUCE_GRAD")
    assert validate(both, channel="worker").ok


def test_what_passes_refuse():
    lowered = with_communication(fill_drain(2, 2))
    with pytest.raises(ValueError, match="'gpipe' already has transfers: pass the schedule without them"):
        with_communication(lowered)
    with pytest.raises(ValueError, match="already has transfers: add skips before transfers"):
        with_skips(lowered, [])
    with pytest.raises(ValueError, match="has transfers: recompute in one that trains, before"):
        with_recompute(lowered, 1)
    with pytest.raises(ValueError, match="has reductions: pass one that trains, without reductions"):
        with_gradient_reduction(with_gradient_reduction(fill_drain(2, 2)))
    with pytest.raises(ValueError, match="'forward-only' has no backwards: pass one that trains"):
        with_gradient_reduction(forward_only(2, 2))
    with pytest.raises(ValueError, match="'forward-only' has no backwards: recompute in one that trains"):
        with_recompute(forward_only(2, 2), 1)
    wrong = schedule_of("0B0 0F0")
    for add in (with_communication, with_gradient_reduction, lambda schedule: with_skips(schedule, [])):
        with pytest.raises(ScheduleError, match="schedule 'test' cannot be executed"):
            add(wrong)
