import pytest

from pipework.schedule import SCHEDULES, Costs, ScheduleSpec, build, compare, fill_drain, simulate


def test_is_what_one_would_simulate_oneself():
    costs = Costs(1, 2.5, transfer=0.1)
    found = compare(workers=4, chunks=6, costs=costs)
    assert set(found.fitting) == set(SCHEDULES) - {"fill-drain", "forward-only"}
    assert not found.others
    for name, result in found.fitting.items():
        share = costs.divided(SCHEDULES[name].stages_per_worker)
        schedule = build(name, workers=4, chunks=6, costs=share)
        assert result.makespan == simulate(schedule, share).makespan
    times = [result.makespan for result in found.fitting.values()]
    assert times == sorted(times)


def test_the_reason_of_those_that_do_not_fit():
    found = compare(workers=4, chunks=8, memory_limit=3, costs=Costs(forward=[1] * 8))
    assert found.others["interleaved-zb"] == "worker 0 holds 4, more than its limit of 3"
    assert "forward has 8 numbers: wanted 4" in found.others["gpipe"]


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


def test_a_limit_for_each_worker():
    found = compare(workers=4, chunks=8, memory_limit=[4, 3, 2, 1])
    assert list(found.fitting) == ["1f1b"]
    assert found.others["zb-h1"] == "worker 1 holds 4, more than its limit of 3"
    assert found.memory_limit == [4, 3, 2, 1]
    with pytest.raises(ValueError, match="memory_limit has 2 numbers: wanted 4"):
        compare(workers=4, chunks=8, memory_limit=[1, 2])


def test_it_prints_as_a_table():
    found = compare(workers=4, chunks=8, memory_limit=3, costs=Costs(forward=[1] * 8))
    assert repr(found) == "Comparison(workers=4, chunks=8: 2 schedules fit, 'v-half' the fastest; 11 do not)"
    lines = str(found).splitlines()
    assert lines[0].split()[0] == "schedule"
    assert "do not fit:" in lines
    with pytest.raises(TypeError):
        found.fitting["mine"] = found.fitting["v-half"]


def test_stages_per_worker_and_schedules_of_ones_own():
    mine = {"mine": ScheduleSpec(fill_drain), "looped-bfs": SCHEDULES["looped-bfs"]}
    found = compare(workers=2, chunks=4, stages_per_worker=3, schedules=mine)
    assert {row["schedule"]: row["stages_per_worker"] for row in found.rows()} == {"mine": 1, "looped-bfs": 3}


def test_gap_is_zero_where_nothing_is_faster():
    rows = {row["schedule"]: row for row in compare(workers=4, chunks=8).rows()}
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v"):
        assert rows[name]["gap"] == pytest.approx(0, abs=1e-12)
    uneven = compare(workers=8, chunks=16, costs=Costs(1, None, None, 1.5, 0.5, transfer=0.05), memory_limit=5)
    assert uneven.fitting["v-half"].gap > 0.01


def test_mistakes_are_not_reasons():
    with pytest.raises(ValueError, match="stages_per_worker is 0"):
        compare(workers=2, chunks=4, stages_per_worker=0)
    with pytest.raises(TypeError, match="costs is 2: wanted Costs"):
        compare(workers=2, chunks=4, costs=2)
    with pytest.raises(ValueError, match="workers is 0"):
        compare(workers=0, chunks=4)
    with pytest.raises(ValueError, match="memory_limit of worker 0 is nan"):
        compare(workers=2, chunks=4, memory_limit=float("nan"))
    with pytest.raises(ValueError, match="channel is 'tube'"):
        compare(workers=2, chunks=4, channel="tube")


def test_the_table_says_what_it_leaves_out():
    said = str(compare(workers=2, chunks=4))
    assert "left out: recomputation, reduction of gradients, the optimizer's step, costs of splitting beyond I" in said
    costly = Costs(recompute=100, reduce_gradient=100)
    assert [row["makespan"] for row in compare(workers=2, chunks=4, costs=costly).rows()] == [
        row["makespan"] for row in compare(workers=2, chunks=4).rows()
    ]
