import pytest

from pipework.schedule import SCHEDULES, Costs, ScheduleSpec, build, compare, fill_drain, simulate


def test_is_what_one_would_simulate_oneself():
    costs = Costs(1, 2.5, transfer=0.1)
    found = compare(workers=4, chunks=6, costs=costs)
    assert set(found.fitting) == set(SCHEDULES) - {"fill-drain", "forward-only"}
    assert not found.others
    for name, result in found.fitting.items():
        share = costs.placed((0,) * SCHEDULES[name].stages_per_worker)
        schedule = build(name, workers=4, chunks=6, costs=share)
        assert result.makespan == simulate(schedule, share).makespan
    times = [result.makespan for result in found.fitting.values()]
    assert times == sorted(times)


def test_numbers_of_workers_fit_schedules_of_any_number_of_stages():
    sizes = {"workers": 4, "chunks": 8}
    found = compare(**sizes, costs=Costs([1.0] * 4, [2.0] * 4, transfer=[0.0] * 3, activation=[1.0] * 4))
    plain = compare(**sizes)
    assert not found.others
    assert {name: each.makespan for name, each in found.fitting.items()} == {
        name: each.makespan for name, each in plain.fitting.items()
    }
    slow = compare(**sizes, costs=Costs([1, 1, 2, 1], [2, 2, 4, 2]))
    assert all(each.busy[2] == 48 for each in slow.fitting.values())


def test_numbers_that_fit_no_schedule():
    with pytest.raises(
        ValueError, match=r"no schedule has as many stages: .*forward has 5 numbers: .*each of the 4 worker"
    ):
        compare(workers=4, chunks=8, costs=Costs(forward=[1] * 5))


def test_it_prints_as_a_table():
    found = compare(workers=4, chunks=8, memory_limit=3, costs=Costs(forward=[1] * 8))
    fit, others = len(found.fitting), len(found.others)
    shown = f"Comparison(workers=4, chunks=8: {fit} schedules fit, 'v-half' the fastest; {others} do not)"
    assert repr(found) == shown
    assert found.others["interleaved-zb"] == "worker 0 holds 4, more than its limit of 3"
    assert "forward has 8 numbers: wanted 4" in found.others["gpipe"]
    lines = str(found).splitlines()
    assert lines[0].split()[0] == "schedule"
    assert "do not fit:" in lines
    with pytest.raises(TypeError):
        found.fitting["mine"] = found.fitting["v-half"]


def test_stages_per_worker_and_schedules_of_ones_own():
    mine = {"mine": ScheduleSpec(fill_drain), "looped-bfs": SCHEDULES["looped-bfs"]}
    found = compare(workers=2, chunks=4, stages_per_worker=3, schedules=mine)
    assert {name: each.schedule.stages for name, each in found.fitting.items()} == {"mine": 2, "looped-bfs": 6}


def test_the_table_says_what_it_leaves_out():
    said = str(compare(workers=2, chunks=4))
    assert "left out: recomputation, reduction of gradients, the optimizer's step, costs of splitting beyond I" in said
    costly = Costs(recompute=100, reduce_gradient=100)
    found = [compare(workers=2, chunks=4, costs=costs).fitting.values() for costs in (None, costly)]
    assert [each.makespan for each in found[0]] == [each.makespan for each in found[1]]
