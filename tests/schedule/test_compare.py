import pytest

from pipework.schedule import SCHEDULES, Costs, Recipe, build, compare, fill_drain, simulate


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
    found = compare(workers=4, chunks=8, memory_limit=3, costs=Costs(forward=[1] * 4))
    assert found.others["gpipe"] == "a worker holds 8, more than the limit of 3"
    assert "forward has 4 numbers: wanted 8" in found.others["v-half"]


def test_stages_per_worker_and_schedules_of_ones_own():
    mine = {"mine": Recipe(fill_drain), "looped-bfs": SCHEDULES["looped-bfs"]}
    found = compare(workers=2, chunks=4, stages_per_worker=3, schedules=mine)
    assert {row["schedule"]: row["stages_per_worker"] for row in found.rows()} == {"mine": 1, "looped-bfs": 3}


def test_gap_is_zero_where_nothing_is_faster():
    rows = {row["schedule"]: row for row in compare(workers=4, chunks=8).rows()}
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v"):
        assert rows[name]["gap"] == pytest.approx(0, abs=1e-12)
    uneven = compare(workers=8, chunks=16, costs=Costs(1, None, None, 1.5, 0.5, transfer=0.05), memory_limit=5)
    assert uneven.fitting["v-half"].gap > 0.01


def test_mistakes_are_not_reasons():
    with pytest.raises(ValueError, match="workers is 0"):
        compare(workers=0, chunks=4)
    with pytest.raises(ValueError, match="memory_limit of worker 0 is nan"):
        compare(workers=2, chunks=4, memory_limit=float("nan"))
    with pytest.raises(ValueError, match="channel is 'tube'"):
        compare(workers=2, chunks=4, channel="tube")
