import random
from dataclasses import replace
from itertools import pairwise

import pytest

from pipework.schedule import (
    KINDS,
    SCHEDULES,
    Costs,
    Kinds,
    ScheduleError,
    build,
    fill_drain,
    forward_only,
    from_csv,
    from_json,
    one_forward_one_backward,
    simulate,
    spread_evenly,
    svg,
    to_json,
    validate,
    with_communication,
    with_offload,
    with_recompute,
    with_sharding,
    with_skips,
)
from pipework.timeline import trace
from pipework.timeline.trace import tracks

# Worker 0 of the documentation's picture, and what its second worker does meanwhile.
SCHEDULE = from_csv("0F0,0O0,0F1,0O1,0F2,0O2,0L0,0B0,0L1,0F3,0B1,0L2,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3")
COSTS = Costs(offload=0.5, reload=0.75, offloaded=0.25)


def check_copies(found):
    """An O ends before the next one begins, an L likewise; each comes after what it needs."""
    line, table = found.timeline, found.timeline.table
    ends = {(table[each.action.kind].gives, *each.action[1:3]): each.end for each in line.intervals}
    ends |= {(each.action.kind, *each.action[1:3]): each.end for each in line.communication}
    for worker in range(line.workers):
        for kind in "OL":
            row = [each for each in line.communication if each.worker == worker and each.action.kind == kind]
            assert all(one.end <= other.start for one, other in pairwise(row))
    for each in (*line.intervals, *line.communication):
        kind, stage, micro_batch, _ = each.action
        needed = [*table[kind].needs, *("L" for _ in "x" if kind in table["L"].before)]
        assert all(each.start >= ends.get((name, stage, micro_batch), 0) for name in needed)
    path = found.critical_path
    assert path[0].start == 0
    assert path[-1].end == found.makespan
    assert all(one.end == other.start for one, other in pairwise(path))


def test_copies_run_beside_the_computation():
    result = simulate(SCHEDULE, COSTS)
    line = result.timeline
    assert {str(each.action): (each.start, each.end) for each in line.communication} == {
        "0O0": (1, 1.5), "0O1": (2, 2.5), "0O2": (3, 3.5), "0L0": (3, 3.75), "0L1": (6, 6.75), "0L2": (9, 9.75),
    }  # fmt: skip
    row = {str(each.action): (each.start, each.end, each.memory) for each in line.by_worker[0]}
    assert row == {
        "0F0": (0, 1, 1), "0F1": (1, 2, 2), "0F2": (2, 3, 2.25), "0B0": (4, 6, 2.25), "0F3": (6, 7, 2.25),
        "0B1": (7, 9, 2.25), "0B2": (10, 12, 2), "0B3": (13, 15, 1),
    }  # fmt: skip
    assert (result.peak_memory, result.stage_peak_memory) == ((2.25, 1), (2.25, 1))
    assert result.busy == (12, 12)
    assert [track.name for track in tracks(line)] == ["compute", "offload", "load", "compute"]
    assert {event["cat"] for event in trace(line)["traceEvents"] if event["name"] in ("0O0", "0L0")} == {
        "offload",
        "load",
    }
    assert all(part in svg(line) for part in (">offload<", ">load<", "offload of stage 0, micro-batch 2: 3 to 3.5"))
    assert from_json(to_json(SCHEDULE)) == SCHEDULE


@pytest.mark.parametrize(
    ("text", "costs", "times"),
    [
        # The next O waits for the one before, and so does the computation behind it.
        ("0F0,0O0,0F1,0O1,0F2,0L0,0B0,0L1,0B1,0B2", Costs(offload=2), "0O1 3 5|0F2 3 4|0L0 5 5|0B0 5 7"),
        # An L right behind an O does not wait for it, one behind a computation does; loads come one after the other.
        ("0F0,0O0,0F1,0O1,0L0,0F2,0L1,0B0,0B1,0B2", Costs(offload=1, reload=3), "0L0 2 5|0F2 2 3|0L1 5 8|0B0 5 7"),
        # What is not back yet, is waited for.
        ("0F0,0O0,0F1,0L0,0B0,0B1", Costs(offload=3, reload=2), "0O0 1 4|0F1 1 2|0L0 4 6|0B0 6 8"),
        # Of a micro-batch that is recomputed, only the input is copied: an eighth.
        ("0F0,0O0,0F1,0L0,0R0,0B0,0B1", Costs(offload=4, reload=8, checkpoint_activation=0.125),
         "0O0 1 1.5|0L0 2 3|0R0 3 4"),
    ],
)  # fmt: skip
def test_times(text, costs, times):
    found = simulate(from_csv(text), costs)
    rows = (*found.timeline.intervals, *found.timeline.communication)
    assert set(times.split("|")) <= {f"{each.action} {each.start:g} {each.end:g}" for each in rows}
    check_copies(found)
    assert any(each.action.kind in "OL" for each in found.critical_path) == (found.exposed_communication > 0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0L1,0F3,0B1", "0F3,0B1,0L1", "worker 0 waits forever at 0B1: it needs 0L1, which is later in its own order"),
        ("0F1,0O1", "0O1,0F1", "worker 0 waits forever at 0O1: it needs 0F1, which is later in its own order"),
        ("0L1,", "", "0L1 is missing in the order of worker 0, which has 0O1"),
        ("0O1,", "", "0O1 is missing in the order of worker 0, which has 0L1"),
        ("0O1,", "0O1,0O1,", "0O1 occurs 2 times, wanted once"),
        ("0L0,0B0", "0R0,0L0,0B0", "worker 0 waits forever at 0R0: it needs 0L0, which is later in its own order"),
        ("0L2,0B2", "0L2,0I2,0W2", None),
    ],
)
def test_what_is_wrong_is_named(old, new, message):
    text = "\n".join(",".join(map(str, order)) for order in SCHEDULE.orders)
    violations = validate(from_csv(text.replace(old, new))).violations
    assert [each.message for each in violations[:1]] == ([] if message is None else [message])


def test_a_loss_outside_comes_before_loads():
    forwards = "0F0,0O0,0F1,0O1,0F2,"
    assert validate(from_csv(f"{forwards}0L0,0B0,0L1,0B1,0B2"), loss_outside=True).ok
    late = validate(from_csv("0F0,0F1,0B0,0O1,0L1,0B1"), loss_outside=True)
    assert "worker 0 waits forever at 0B0: it needs the loss" in late.violations[0].message
    early = validate(from_csv("0F0,0O0,0F1,0L0,0F2,0B0,0B1,0B2"), loss_outside=True)
    assert "worker 0 waits forever at 0L0: it needs the loss" in early.violations[0].message
    moving = with_offload(fill_drain(2, 6), loss_outside=True)
    assert validate(moving, loss_outside=True).ok
    assert max(simulate(moving).peak_memory) < 6


def test_orders():
    assert [" ".join(map(str, order)) for order in with_offload(one_forward_one_backward(3, 5)).orders] == [
        "0F0 0O0 0F1 0O1 0F2 0O2 0L0 0B0 0L1 0F3 0O3 0B1 0L2 0F4 0B2 0L3 0B3 0B4",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ]
    # A slower link: loads begin earlier, so that more is on the device.
    slow = with_offload(one_forward_one_backward(4, 6), Costs(offload=2, reload=2))
    assert " ".join(map(str, slow.orders[0])) == (
        "0F0 0O0 0F1 0O1 0F2 0O2 0F3 0O3 0L0 0L1 0B0 0F4 0O4 0L2 0B1 0F5 0L3 0B2 0L4 0B3 0B4 0B5"
    )
    kept = with_offload(fill_drain(1, 8), keep=4)
    assert (
        " ".join(map(str, kept.orders[0]))
        == "0F0 0O0 0F1 0O1 0F2 0O2 0F3 0O3 0F4 0F5 0F6 0L0 0F7 0L1 0B0 0L2 0B1 0L3 0B2 0B3 0B4 0B5 0B6 0B7"
    )


def test_named_schedules():
    """Each is valid, holds less, and takes no longer if a copy takes no longer than a forward."""
    generator = random.Random(0)
    passes = [
        lambda schedule: schedule,
        lambda schedule: with_recompute(schedule, schedule.micro_batches),
        lambda schedule: with_recompute(schedule, [spread_evenly(2, schedule.micro_batches)] * schedule.stages),
        lambda schedule: with_skips(schedule, [(0, schedule.stages - 1)]),
    ]
    moved = set()
    for name in sorted(set(SCHEDULES) - {"forward-only"}):
        for workers, chunks, keep in ((2, 6, 2), (4, 8, 1)):
            schedule = generator.choice(passes)(build(name, workers=workers, chunks=chunks))
            time = generator.choice([0.25, 0.5, 1.0])
            costs = Costs(offload=time, reload=time, offloaded=0.125, checkpoint_activation=0.25)
            moving = with_offload(schedule, costs, keep)
            plain, found = simulate(schedule, costs), simulate(moving, costs)
            # A recompute may come right behind another, so that its input is late by a fraction of a forward.
            assert found.makespan <= plain.makespan + ("R" in schedule.kinds) * costs.reload / 4, (schedule, keep)
            assert found.lower_bound <= found.makespan
            for before, after in zip(plain.peak_memory, found.peak_memory, strict=True):
                assert after <= before
            for before, after in zip(schedule.orders, moving.orders, strict=True):
                assert before == tuple(action for action in after if action.kind not in "OL")
            assert (moving is schedule) == moving.kinds.isdisjoint("OL")
            if moving is not schedule:
                moved.add(name)
                slow = replace(costs, offload=generator.uniform(0, 4), reload=generator.uniform(0, 4))
                check_copies(simulate(moving, slow))
                channel = generator.choice(["pair", "worker"])
                assert validate(with_communication(moving, costs, channel=channel), channel=channel).ok
                assert validate(with_sharding(moving, 1)).ok
    assert moved == {*SCHEDULES} - {"forward-only"}


def test_what_does_not_move_is_returned():
    # One for inference; the backward of each micro-batch comes right after its forward; more stay than there are.
    for schedule, keep in ((forward_only(2, 8), 1), (fill_drain(2, 1), 1), (fill_drain(2, 4), 4)):
        assert with_offload(schedule, keep=keep) is schedule


def test_with_none_that_stays_a_worker_of_several_stages_holds_a_part_of_a_micro_batch():
    schedule = build("interleaved-1f1b", workers=2, chunks=8, stages_per_worker=4)
    costs = Costs(forward=1 / 4, backward=2 / 4, activation=1 / 4, offload=1 / 4, reload=1 / 4)
    peaks = [max(simulate(with_offload(schedule, costs, keep), costs).peak_memory) for keep in (2, 1, 0)]
    assert peaks == [2.25, 1.25, 0.5]
    # A backward right after its forward, as on the last worker, finds everything there.
    last = with_offload(one_forward_one_backward(2, 4), keep=0)
    assert "O" not in {each.kind for each in last.orders[1]}


def test_errors():
    schedule = fill_drain(2, 4)
    for keep in (-1, True, 1.0):
        with pytest.raises(ValueError, match=f"keep is {keep}: wanted an integer of at least 0"):
            with_offload(schedule, keep=keep)
    with pytest.raises(TypeError, match="costs is 3: wanted Costs"):
        with_offload(schedule, 3)
    with pytest.raises(ValueError, match="has transfers: offload in one without, before transfers"):
        with_offload(with_communication(schedule))
    with pytest.raises(ValueError, match="has copies to the host: offload in one without"):
        with_offload(with_offload(schedule))
    with pytest.raises(ValueError, match="the table of schedule 'csv' has no O and L: make it of those of KINDS"):
        with_offload(from_csv("0F0,0B0", table=Kinds(KINDS["F"], KINDS["B"])))
    with pytest.raises(ScheduleError, match="cannot be executed"):
        with_offload(from_csv("0B0,0F0"))
