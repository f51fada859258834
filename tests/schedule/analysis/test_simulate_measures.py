"""The measures alone are those of a whole simulation and of its timeline, to the last bit."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipework.schedule import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
    ScheduleError,
    build,
    fill_drain,
    measure,
    simulate,
    with_communication,
    with_gradient_reduction,
    with_recompute,
    with_skips,
)

amounts = st.sampled_from([0.0, 0.1, 0.3, 1.0]) | st.floats(0, 3)


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    count = {"stages_per_worker": 2 * draw(st.integers(1, 2))} if SCHEDULES[name].several else {}
    schedule = build(name, workers=draw(st.integers(1, 4)), chunks=draw(st.integers(1, 6)), **count)
    if not schedule.inference:
        schedule = with_recompute(schedule, draw(st.integers(0, schedule.micro_batches)))
    if schedule.stages > 2 and draw(st.booleans()):
        schedule = with_skips(schedule, [(0, 2)])
    return schedule


def some_costs(draw, schedule):
    def each(count=schedule.stages):
        return draw(st.lists(amounts, min_size=count, max_size=count))

    return Costs(
        forward=each(),
        input_gradient=each(),
        weight_gradient=each(),
        recompute=each(),
        reduce_gradient=each(),
        transfer=each(schedule.stages - 1),
        skip_transfer=each(len(schedule.skips)),
        activation=each(),
        checkpoint_activation=each(),
        waiting=each(),
    )


def check(schedule, costs, *, loss_outside):
    found = measure(schedule, costs, loss_outside=loss_outside)
    result = simulate(schedule, costs, loss_outside=loss_outside)
    line = result.timeline
    for names, other in (
        (("makespan", "span", "bubble", "span_bubble", "busy", "peak_memory"), result),
        (("makespan", "span", "start", "bubble", "span_bubble"), line),
    ):
        assert {name: getattr(found, name) for name in names} == {name: getattr(other, name) for name in names}
    workers = range(schedule.workers)
    assert found.busy == tuple(map(line.busy, workers))
    assert found.peak_memory == tuple(map(line.peak_memory, workers))


@settings(max_examples=40)
@given(schedules(), st.booleans(), st.data())
def test_equal_to_the_simulation(schedule, loss_outside, data):
    try:
        check(schedule, some_costs(data.draw, schedule), loss_outside=loss_outside)
    except ScheduleError:
        # A loss outside needs all forwards first; both say so.
        assert loss_outside


@settings(max_examples=20)
@given(st.sampled_from(["1f1b", "zb-v", "interleaved-1f1b"]), st.booleans(), st.data())
def test_equal_with_transfers_and_reductions(name, reduces, data):
    schedule = build(name, workers=3, chunks=4)
    costs = some_costs(data.draw, schedule)
    schedule = with_communication(schedule, channel=data.draw(st.sampled_from(["pair", "worker"])))
    check(with_gradient_reduction(schedule) if reduces else schedule, costs, loss_outside=False)


def test_a_deadlock_is_an_error():
    crossed = Schedule("crossed", (0,), ((Action("B", 0, 0), Action("F", 0, 0)),))
    with pytest.raises(ScheduleError, match="worker 0 waits forever at 0B0: it needs 0F0"):
        measure(crossed)


def test_what_is_no_schedule_is_named():
    with pytest.raises(TypeError, match=r"schedule is '1f1b': wanted a Schedule, such as build\("):
        measure("1f1b")
    with pytest.raises(ValueError, match="forward has 3 numbers: wanted 2, one for each stage"):
        measure(fill_drain(2, 2), Costs(forward=[1, 2, 3]))


def test_costs_of_zero_have_no_bubble():
    assert measure(fill_drain(2, 2), Costs(forward=0, backward=0)).bubble == 0


def test_there_is_no_object_for_each_action():
    schedule = build("zb-v", workers=32, chunks=32)
    measure(schedule)  # what a schedule knows about itself is there now
    tracemalloc.start()
    try:
        found = measure(schedule)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.makespan > 0
    assert most < 60 * sum(map(len, schedule.orders))
