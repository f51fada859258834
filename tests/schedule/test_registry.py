import pytest

from pipework.schedule import (
    SCHEDULES,
    Action,
    Costs,
    ScheduleSpec,
    build,
    compare,
    dualpipe_v,
    fill_drain,
    interleaved_1f1b,
    interleaved_zb,
    list_schedule,
    looped_bfs,
    lower_bound,
    one_forward_one_backward,
    simulate,
    zb_v,
)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["gpipe", "fill-drain", "GPipe", "ScheduleGPipe"], fill_drain(3, 5)),
        (["1f1b", "1F1B", "Schedule1F1B"], one_forward_one_backward(3, 5)),
        (["interleaved-1f1b", "Interleaved1F1B", "scheduleinterleaved1f1b"], interleaved_1f1b(3, 5, 2)),
        (["looped-bfs", "LoopedBFS", "ScheduleLoopedBFS"], looped_bfs(3, 5, 2)),
        (["interleaved-zb", "InterleavedZeroBubble", "ScheduleInterleavedZeroBubble"], interleaved_zb(3, 5, 2)),
        (["zb-v", "ZBVZeroBubble", "ScheduleZBVZeroBubble"], zb_v(3, 5)),
        (["dualpipe-v", "DualPipeV", "ScheduleDualPipeV"], dualpipe_v(3, 5)),
    ],
)
def test_names(names, expected):
    for name in names:
        assert build(name, workers=3, chunks=5) == expected


def test_an_unknown_name():
    for name, hint in (("nothing", "choose"), (None, "choose"), (["gpipe"], "choose"), ("1FB1", "'1f1b'. Choose")):
        with pytest.raises(ValueError, match=f"{hint} one of 'gpipe', 'fill-drain', '1f1b'"):
            build(name, workers=3, chunks=5)


def test_stages_per_worker():
    assert build("interleaved-1f1b", workers=3, chunks=5, stages_per_worker=4).stages == 12
    assert build("1f1b", workers=3, chunks=5, stages_per_worker=1).stages == 3
    with pytest.raises(ValueError, match=r"'1f1b' has stages_per_worker=1, got 2: choose one of 'interleaved"):
        build("1f1b", workers=3, chunks=5, stages_per_worker=2)
    with pytest.raises(ValueError, match="stages_per_worker is 0"):
        build("looped-bfs", workers=3, chunks=5, stages_per_worker=0)


def test_costs_decide_about_orders():
    heavy = Costs(forward=1, input_gradient=3, weight_gradient=0.25)
    sizes = {"workers": 4, "chunks": 8}
    plain, made = build("zb-v", **sizes), build("zb-v", **sizes, costs=heavy)
    assert plain != made
    assert simulate(made, heavy).makespan <= simulate(plain, heavy).makespan
    assert build("zb-h1", **sizes, costs=heavy) == build("zb-h1", **sizes)
    with pytest.raises(ValueError, match="forward has 2 numbers: wanted 8"):
        build("zb-v", **sizes, costs=Costs(forward=[1, 2]))


def test_costs_of_other_stages_are_refused_by_all():
    for name in SCHEDULES:
        with pytest.raises(ValueError, match="forward has 7 numbers: wanted"):
            build(name, workers=2, chunks=3, costs=Costs(forward=[1] * 7))
    skipping = Costs(skip_transfer=[1, 2, 3])
    assert build("zb-v", workers=2, chunks=3, costs=skipping) == build("zb-v", workers=2, chunks=3)
    assert lower_bound((0, 1), 3, skipping) == lower_bound((0, 1), 3)
    actions = [[Action(kind, stage, i) for i in range(3) for kind in "FI"] for stage in range(2)]
    assert list_schedule((0, 1), actions, costs=skipping, limit=2) == list_schedule((0, 1), actions, limit=2)
    assert compare(workers=2, chunks=3, costs=skipping).fitting.keys() == compare(workers=2, chunks=3).fitting.keys()


def test_a_generator_that_makes_no_schedule():
    with pytest.raises(TypeError, match=r"of a spec made \(2, 3\): wanted a Schedule"):
        build("mine", workers=2, chunks=3, schedules={"mine": ScheduleSpec(lambda *sizes: sizes)})


def test_costs_of_whole_shares():
    costs = Costs([1, 2], transfer=[0.5])
    schedule = build("zb-v", workers=2, chunks=4, costs=costs.placed)
    share = costs.placed(schedule.placement)
    assert share.spread(4)["forward"] == (0.5, 1, 1, 0.5)
    assert share.transfer == (0.5, 0, 0.5)
    assert schedule == build("zb-v", workers=2, chunks=4, costs=share)
    with pytest.raises(ValueError, match="forward has 3 numbers: wanted 2"):
        build("1f1b", workers=2, chunks=4, costs=Costs([1, 2, 3]).placed)


def test_a_larger_registry_has_ones_own():
    mine = SCHEDULES | {"mine": ScheduleSpec(fill_drain)}
    assert build("Mine", workers=2, chunks=3, schedules=mine) == fill_drain(2, 3)
    assert build("1f1b", workers=2, chunks=3, schedules=mine) == one_forward_one_backward(2, 3)
    with pytest.raises(ValueError, match=r"choose one of 'mine'$"):
        build("zb-v", workers=2, chunks=3, schedules={"mine": ScheduleSpec(fill_drain)})
