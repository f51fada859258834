"""The critical path has no holes, and is as long as the step, whatever the schedule and the costs.

The measures of each of these steps are those of its timeline, to the last bit.
"""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipework.schedule import (
    SCHEDULES,
    Costs,
    build,
    looped_bfs,
    measure,
    simulate,
    validate,
    with_communication,
    with_gradient_reduction,
    with_recompute,
    with_skips,
)

times = st.sampled_from([0.0, 0.125, 0.5, 1.0]) | st.floats(0.01, 4)


def path_of(result):
    return " ".join(str(each.action) for each in result.critical_path)


def delay(result, before, after):
    """How long what one action makes takes to reach another, if the timeline has no transfers."""
    schedule = result.schedule
    costs = result.costs.spread(schedule.stages, len(schedule.skips))
    source, target = sorted((before.action.stage, after.action.stage))
    transfers = any(each.action.peer >= 0 for each in result.timeline.communication)
    if before.worker == after.worker or transfers:
        return 0.0
    if (source, target) in schedule.skips:
        return costs["skip_transfer"][schedule.skips.index((source, target))]
    # A loss outside is there at once for everybody.
    return costs["transfer"][source] if target == source + 1 else 0.0


def check(result):
    line = result.timeline
    for name in ("makespan", "span", "start", "bubble", "span_bubble"):
        assert getattr(result, name) == getattr(line, name)
    workers = range(line.workers)
    assert (result.busy, result.peak_memory) == (tuple(map(line.busy, workers)), tuple(map(line.peak_memory, workers)))
    if result.options.channel == "unbounded":
        alone = measure(result.schedule, result.costs, loss_outside=result.options.loss_outside)
        assert vars(alone) == {name: getattr(result, name) for name in vars(alone)}

    path = result.critical_path
    assert path
    if not result.makespan:
        return
    everything = {*result.timeline.intervals, *result.timeline.communication}
    assert set(path) <= everything
    assert len(set(path)) == len(path)
    assert path[0].start == result.timeline.start
    assert path[-1].end == result.timeline.end
    length = path[0].end - path[0].start
    for before, after in pairwise(path):
        gap = after.start - before.end
        assert gap == 0 or gap == pytest.approx(delay(result, before, after))
        length += gap + after.end - after.start
    assert length == pytest.approx(result.makespan)


@st.composite
def costs_of(draw, schedule):
    stages = schedule.stages

    def each(count=stages):
        one = times.map(lambda time: [time] * count)
        return draw(one | st.lists(times, min_size=count, max_size=count))

    return Costs(
        forward=each(),
        recompute=each(),
        input_gradient=each(),
        weight_gradient=each(),
        reduce_gradient=each(),
        transfer=each(stages - 1),
        skip_transfer=each(len(schedule.skips)),
        activation=each(),
        checkpoint_activation=each(),
        waiting=each(),
    )


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    workers=st.integers(1, 5),
    chunks=st.integers(1, 6),
    channel=st.sampled_from(["unbounded", "pair", "worker"]),
    data=st.data(),
)
@pytest.mark.thorough
def test_it_has_no_holes_and_is_as_long_as_the_step(name, workers, chunks, channel, data):
    schedule = build(name, workers=workers, chunks=chunks)
    if not schedule.inference:
        schedule = with_recompute(schedule, data.draw(st.integers(0, chunks)))
        if data.draw(st.booleans()):
            schedule = with_gradient_reduction(schedule)
    skips = data.draw(st.lists(st.lists(st.integers(0, schedule.stages - 1), min_size=2, max_size=2).map(sorted)))
    schedule = with_skips(schedule, skips)
    if data.draw(st.booleans()):
        schedule = with_communication(schedule, channel="worker")
    costs = data.draw(costs_of(schedule))
    outside = data.draw(st.booleans()) and validate(schedule, loss_outside=True).ok
    check(simulate(schedule, costs, loss_outside=outside, channel=channel))


def test_a_loss_outside_joins_the_last_forward_to_the_first_backward():
    # Worker 0 is alone until 9, so that the last forward of all is the one on worker 1.
    result = simulate(looped_bfs(2, 2, 1), Costs(forward=[4, 1], backward=[1, 4]), loss_outside=True)
    assert path_of(result) == "0F0 0F1 1F1 1B0 1B1 0B1"
