from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import Costs, build, fill_drain, simulate, with_gradient_reduction, with_recompute, with_skips

times = st.floats(0.125, 8)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_physics(workers, micro_batches, data):
    """Whatever the costs: nobody overlaps himself, nothing starts before its data, no step is shorter than its work."""

    def each(count=workers):
        return data.draw(st.lists(times, min_size=count, max_size=count))

    checkpointed = data.draw(st.integers(0, micro_batches))
    schedule = with_recompute(fill_drain(workers, micro_batches), checkpointed)
    costs = Costs(forward=each(), backward=each(), recompute=each(), transfer=each(workers - 1), activation=each())
    result = simulate(schedule, costs, loss_outside=data.draw(st.booleans()))
    assert result.makespan >= max(result.busy) - 1e-9
    assert result.makespan >= result.span
    assert 0 <= result.bubble < 1
    end = {each.action[:3]: each.end for each in result.timeline.intervals}
    for row in result.timeline.by_worker:
        assert tuple(each.action for each in row) == schedule.orders[row[0].worker]
        for before, after in pairwise(row):
            assert after.start >= before.end
        for (kind, stage, micro_batch, _), start in ((each.action, each.start) for each in row):
            if kind == "F" and stage:
                assert start >= end["F", stage - 1, micro_batch] + costs.transfer[stage - 1] - 1e-9
            if kind == "B" and stage + 1 < workers:
                assert start >= end["B", stage + 1, micro_batch] + costs.transfer[stage] - 1e-9
        assert row[-1].memory == pytest.approx(costs.activation[row[0].worker])  # all others were freed


def test_loss_outside_starts_the_drain_after_every_forward():
    # Stage 0 is slow, so that the last worker could begin its backward long before the last forward.
    schedule = with_recompute(fill_drain(2, 3), 1)
    inside, outside = simulate(schedule), simulate(schedule, loss_outside=True)
    forwards_end = max(each.end for each in outside.timeline.intervals if each.action.kind == "F")
    drain_starts = min(each.start for each in outside.timeline.intervals if each.action.kind != "F")
    assert drain_starts == forwards_end == 4
    assert min(each.start for each in inside.timeline.intervals if each.action.kind == "R") == 3


def test_peaks_of_stages_that_share_a_worker():
    """By themselves: added up they are no less than what their worker holds at once."""
    result = simulate(build("interleaved-1f1b", workers=2, chunks=4, stages_per_worker=2))
    by_worker = [result.stage_peak_memory[worker] + result.stage_peak_memory[worker + 2] for worker in range(2)]
    assert result.stage_peak_memory == (4, 3, 2, 1)
    assert all(most <= total for most, total in zip(result.peak_memory, by_worker, strict=True))


def test_it_is_shown_in_a_line():
    shown = repr(simulate(fill_drain(2, 8), Costs(backward=2)))
    assert shown == "Simulation(gpipe, 2 workers, 8 micro-batches: makespan 27, bubble 11.1%)"


def test_transfers_that_take_time_cost_a_multiple_of_it():
    for name, slope in (("1f1b", 68), ("eager-1f1b", 14), ("v-min", 188)):
        schedule = build(name, workers=8, chunks=32)
        result = simulate(schedule, Costs(transfer=0.125).placed(schedule.placement))
        assert result.exposed_communication == slope * 0.125


def test_receives_that_are_posted_in_time_cost_nothing_on_ordered_channels():
    schedule = build("interleaved-1f1b", workers=8, chunks=32)
    costs = Costs(transfer=0.0625).placed(schedule.placement)
    ideal = simulate(schedule, costs).makespan
    for channel in ("pair", "worker"):
        result = simulate(schedule, costs, channel=channel)
        assert result.makespan == ideal
        sends = [each for each in result.timeline.communication if each.action.kind.startswith("SEND")]
        assert len(sends) == 2 * 15 * 32
        assert all(each.end - each.start == 0.0625 for each in sends)


def test_a_slow_skip_delays_both_ends():
    schedule = with_skips(fill_drain(3, 1), [(0, 2)])
    assert simulate(schedule, Costs(skip_transfer=1)).makespan == 9
    slow = simulate(schedule, Costs(skip_transfer=[5]))
    assert slow.makespan == 1 + 5 + 3 + 5 + 2
    assert slow.gap > 0
    # Stage 2 needs what came from stage 1 and, on a slow way, from stage 0, which had ended earlier.
    assert [str(each.action) for each in slow.critical_path] == ["0F0", "2F0", "2B0", "0B0"]


def test_reductions_run_beside_the_computation():
    schedule = with_gradient_reduction(build("looped-bfs", workers=1, chunks=2))
    plain, result = simulate(schedule), simulate(schedule, Costs(reduce_gradient=3))
    assert result.busy == plain.busy == (12,)
    reductions = {str(each.action): (each.start, each.end) for each in result.timeline.communication}
    assert reductions == {"1REDUCE_GRAD": (8, 11), "0REDUCE_GRAD": (12, 15)}
    assert result.makespan == 15
    assert result.exposed_communication == 3
    assert str(result.critical_path[-1].action) == "0REDUCE_GRAD"
    one_after_the_other = simulate(schedule, Costs(reduce_gradient=10)).timeline.communication
    assert sorted((each.start, each.end) for each in one_after_the_other) == [(8, 18), (18, 28)]


def test_the_timeline_is_made_when_it_is_asked_for():
    result = simulate(build("zb-v", workers=2, chunks=3))
    assert result.makespan > 0
    assert result.lower_bound > 0
    assert result.critical_path[-1].end == result.makespan
    assert "timeline" not in vars(result)
    assert result.timeline is result.timeline
    assert result == simulate(build("zb-v", workers=2, chunks=3))
    assert hash(result) == hash(simulate(build("zb-v", workers=2, chunks=3)))
