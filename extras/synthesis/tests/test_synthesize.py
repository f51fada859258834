import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipework.schedule import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    build,
    from_csv,
    from_json,
    loop_placement,
    lower_bound,
    simulate,
    to_csv,
    to_json,
    validate,
    wave_placement,
)
from pipework_synthesis import Synthesis, solving, synthesize
from pipework_synthesis.problem import problem_of
from pipework_synthesis.stretch import fewer
from pipework_synthesis.synthesize import _ToBeginFrom

COSTS = {
    "A": Costs(),
    "B": Costs(input_gradient=1.1, weight_gradient=0.7, transfer=0.05),
    "D": Costs(input_gradient=1.5, weight_gradient=0.5, transfer=0.05),
}
PLACEMENTS = [(0, 1, 2), wave_placement(2, 2), loop_placement(2, 2), (0, 1, 1, 0, 0), wave_placement(3, 2)]
SOLVERS = [False, pytest.param(True, marks=pytest.mark.skipif(not solving.available(), reason="needs ortools"))]


def lanes_ascend(schedule: Schedule) -> bool:
    latest: dict[tuple[str, int], int] = {}
    for order in schedule.orders:
        for kind, stage, micro_batch, _ in order:
            if micro_batch <= latest.get((kind, stage), -1):
                return False
            latest[kind, stage] = micro_batch
    return True


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_never_slower_than_a_named_schedule_and_within_memory(
    placement: tuple[int, ...], costs: Costs, solver: bool
) -> None:
    share = costs.placed(placement)
    for limit in (2, None):
        found = synthesize(placement, 5, share, memory_limit=limit, iterations=3, solver=solver)
        again = simulate(found.schedule, share, memory_limit=limit)
        assert again.makespan == pytest.approx(found.makespan)
        assert all(found.makespan <= makespan * (1 + 1e-9) for makespan in found.named.values())
        assert found.makespan >= found.lower_bound * (1 - 1e-9)
        assert lower_bound(placement, 5, share, memory_limit=limit) <= found.lower_bound * (1 + 1e-9)
        assert validate(found.schedule, share, memory_limit=limit).ascending
        assert lanes_ascend(found.schedule)
        assert found.schedule.name == "synthesised"
        assert found.solver is solver


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("split", [True, False])
def test_one_worker_has_nothing_to_search_for(split: bool, solver: bool) -> None:
    lines: list[str] = []
    costs = Costs(forward=0.1, backward=0.7)  # 0.1 + 0.7 + 0.1 + .. is not 3 * 0.8
    for micro_batches in range(1, 8):
        found = synthesize(
            (0,), micro_batches, costs, split=split, iterations=10**9, solver=solver, progress=lines.append
        )
        assert found.makespan == pytest.approx(found.lower_bound)


@pytest.mark.parametrize("solver", SOLVERS)
def test_iterations_give_the_same_schedule_each_time(solver: bool) -> None:
    costs = COSTS["D"].placed(wave_placement(3, 2))
    one, other = (
        synthesize(wave_placement(3, 2), 10, costs, memory_limit=2, iterations=8, solver=solver) for _ in range(2)
    )
    assert one.schedule == other.schedule


@pytest.mark.slow
@pytest.mark.timeout(900)  # how long the proof takes depends on the machine
def test_finds_what_is_known_to_be_optimal() -> None:
    pytest.importorskip("ortools")
    costs = COSTS["D"].placed(wave_placement(4, 2))
    found = synthesize(wave_placement(4, 2), 8, costs, memory_limit=3, seconds=600)
    assert found.makespan == pytest.approx(29.9)
    assert found.optimal
    assert min(found.named.values()) > 31


@pytest.mark.thorough
def test_proves_that_a_small_schedule_is_optimal() -> None:
    pytest.importorskip("ortools")
    costs = COSTS["D"].placed(wave_placement(2, 2))
    found = synthesize(wave_placement(2, 2), 4, costs, memory_limit=2, iterations=30)
    assert found.optimal


def all_orders(own: list[list[str]]) -> set[tuple[str, ...]]:
    """All ways to put chains of actions into one order, each chain ascending."""
    found = set()
    if not any(own):
        return {()}
    for number, chain in enumerate(own):
        if chain:
            rest = [list(each) for each in own]
            rest[number] = chain[1:]
            found |= {(chain[0], *others) for others in all_orders(rest)}
    return found


def brute_force(placement: Sequence[int], micro_batches: int, costs: Costs, limit: float) -> float:
    """The best makespan of all orders of whole backwards, micro-batches ascending."""
    per_worker = []
    for worker in range(1 + max(placement)):
        own = [stage for stage, home in enumerate(placement) if home == worker]
        lanes = [[f"{stage}{kind}{i}" for i in range(micro_batches)] for stage in own for kind in "FB"]
        per_worker.append([tuple(map(Action.parse, order)) for order in all_orders(lanes)])
    best = float("inf")

    def search(orders: tuple[tuple[Action, ...], ...]) -> None:
        nonlocal best
        if len(orders) == len(per_worker):
            try:
                schedule = Schedule("all", tuple(placement), orders)
                best = min(best, simulate(schedule, costs, memory_limit=limit).makespan)
            except ScheduleError:
                pass
            return
        for order in per_worker[len(orders)]:
            search((*orders, order))

    search(())
    return best


@pytest.mark.parametrize("seed", range(6))
def test_as_fast_as_brute_force(seed: int) -> None:
    pytest.importorskip("ortools")
    draws = Random(seed)
    forward = [draws.choice([1.0, 2.0, 3.0]) for _ in range(2)]
    backward = [draws.choice([1.0, 2.5, 4.0]) for _ in range(2)]
    costs = Costs(forward, backward, transfer=0.5, activation=[draws.choice([1.0, 2.0]) for _ in range(2)])
    limit = draws.choice([2, 3, 4])
    found = synthesize((0, 1), 3, costs, memory_limit=limit, split=False, iterations=10)
    assert found.makespan == pytest.approx(brute_force((0, 1), 3, costs, limit))
    assert found.optimal


@given(st.integers(0, 10_000))
@settings(max_examples=15)
def test_unequal_stages_and_limits_randomly(seed: int) -> None:
    draws = Random(seed)
    placement = draws.choice([(0, 1), (0, 1, 0), (0, 1, 1, 0), (0, 1, 2), (0, 1, 0, 1)])
    stages, workers = len(placement), 1 + max(placement)

    def each(values: list[float]) -> list[float]:
        return [draws.choice(values) for _ in range(stages)]

    costs = Costs(
        each([0.3, 1.0, 2.7]),
        draws.choice([None, each([1.0, 2.0])]),
        recompute=each([0.5, 1.0]),
        input_gradient=each([0.7, 1.0]),
        weight_gradient=each([0.2, 1.0]),
        transfer=draws.choice([0.0, 0.3]),
        activation=each([1.0, 1.7]),
        checkpoint_activation=each([0.1, 0.4]),
        waiting=draws.choice([None, each([0.3, 1.0, 2.2])]),
    )
    m = draws.randrange(1, 5)
    first = [draws.randrange(m + 1) for _ in range(stages)]
    some = [draws.sample(range(m), count) for count in first]
    recomputed = draws.choice([[0] * stages, first, some])
    allowed = [set(range(each) if isinstance(each, int) else each) for each in recomputed]
    split = draws.random() < 0.7
    # What one micro-batch holds at most; a limit below it is refused.
    own = [placement.count(worker) for worker in range(workers)]
    limits = [2.2 * count + draws.uniform(0.0, 3.0) for count in own] if draws.random() < 0.9 else [0.5] * workers
    for solver in (False, solving.available()):

        def search(solver: bool = solver) -> Synthesis:
            return synthesize(
                placement,
                m,
                costs,
                memory_limit=limits,
                split=split,
                recomputed=recomputed,
                iterations=4,
                solver=solver,
            )

        if limits[0] == 0.5:
            with pytest.raises(ValueError, match="raise the limit to"):
                search()
            return
        found = search()
        assert simulate(found.schedule, costs, memory_limit=limits).makespan == pytest.approx(found.makespan)
        assert found.makespan >= found.lower_bound * (1 - 1e-9)
        assert lanes_ascend(found.schedule)
        assert split or not found.schedule.split_stages
        for stage in range(stages):
            again = {a.micro_batch for order in found.schedule.orders for a in order if a[:2] == ("R", stage)}
            assert again <= allowed[stage]


def test_the_smallest_limit_that_a_refusal_names_is_enough() -> None:
    costs = Costs(activation=[1, 2, 3, 4], waiting=5)
    with pytest.raises(
        ValueError, match=r"memory_limit of worker 1 is 4, but one micro-batch holds 5 there.*raise the"
    ):
        synthesize((0, 1, 1, 0), 4, costs, memory_limit=[5, 4], iterations=1)
    found = synthesize((0, 1, 1, 0), 4, costs, memory_limit=[5, 5], iterations=1)
    assert max(found.simulation.peak_memory) <= 5


@pytest.mark.thorough
def test_seeds_are_a_beginning() -> None:
    costs = COSTS["B"].placed(wave_placement(2, 2))
    first = synthesize(wave_placement(2, 2), 6, costs, memory_limit=2, iterations=20)
    seed = replace(first.schedule, name="mine")
    second = synthesize(wave_placement(2, 2), 6, costs, memory_limit=2, iterations=1, solver=False, seeds=[seed])
    assert second.named["mine"] == pytest.approx(first.makespan)
    assert second.makespan <= first.makespan * (1 + 1e-9)
    other = build("1f1b", workers=2, chunks=6)  # of another placement
    assert "1f1b" not in synthesize(wave_placement(2, 2), 6, costs, iterations=1, seeds=[other]).named


def test_named_schedules_may_be_left_out() -> None:
    placement, options = wave_placement(2, 2), {"iterations": 1, "solver": False}
    seed = replace(build("zb-v", workers=2, chunks=6), name="mine")
    assert set(synthesize(placement, 6, named=False, seeds=[seed], **options).named) == {"mine"}
    alone = synthesize(placement, 6, named=False, **options)
    assert not alone.named
    assert validate(alone.schedule).ok


def test_of_large_schedules_the_fastest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["pipework_synthesis.synthesize"], "_MOST_ACTIONS", 40)  # each of them has 16
    schedules = [build(name, workers=2, chunks=4) for name in ("1f1b", "eager-1f1b", "gpipe", "hanayo")]
    kept = _ToBeginFrom()
    for schedule, makespan in zip(schedules[:3], (3.0, inf, 2.0), strict=True):
        kept.add(schedule, makespan)
    assert kept.schedules == [schedules[0], schedules[2]]
    kept.add(schedules[3], 1.0)  # has 32
    assert kept.schedules == [schedules[3]]
    kept = _ToBeginFrom()
    monkeypatch.setattr(sys.modules["pipework_synthesis.synthesize"], "_MOST_ACTIONS", 1)
    kept.add(schedules[0], inf)
    assert kept.schedules == [schedules[0]]  # one is kept, however large


@pytest.mark.parametrize("again", [frozenset[int](), {0}, {1, 4, 6}, frozenset(range(8))])
def test_fewer_micro_batches_recompute_as_large_a_share(again: frozenset[int]) -> None:
    problem = problem_of((0, 1), 8, Costs().spread(2), (8, 8), [again, ()], split=True)
    shorter = fewer(problem, 4)
    assert (shorter.micro_batches, [len(each) for each in shorter.again]) == (4, [4, 4])
    assert [sum(each) for each in shorter.again] == [round(len(again) / 2), 0]


def test_saved_and_read(tmp_path: Path) -> None:
    schedule = synthesize((0, 1, 1, 0), 5, COSTS["D"].placed((0, 1, 1, 0)), memory_limit=2, iterations=5).schedule
    assert from_json(to_json(schedule)) == schedule
    read = from_csv(to_csv(schedule), name=schedule.name)
    assert (read.orders, read.placement) == (schedule.orders, schedule.placement)


def test_tells_of_progress_and_of_what_it_found() -> None:
    lines: list[str] = []
    found = synthesize((0, 1, 1, 0), 6, memory_limit=6, iterations=4, solver=False, progress=lines.append)
    assert lines
    assert all(" by " in line for line in lines)
    text = str(found)
    assert "synthesised" in text
    assert "without OR-tools (pip install ortools finds more)" in text
    assert f"found by {found.found_by}" in text


def test_without_or_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "find_spec", lambda name: None)
    assert not synthesize((0, 1), 3, iterations=1).solver
    with pytest.raises(ModuleNotFoundError, match=r"pip install ortools"):
        synthesize((0, 1), 3, iterations=1, solver=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": ()}, "placement is empty"),
        ({"micro_batches": 0}, "micro_batches is 0: wanted an integer of at least 1"),
        ({"memory_limit": [1]}, "memory_limit has 1 number: wanted 2"),
        ({"memory_limit": 0.5}, "raise the limit to 1"),
        ({"recomputed": [1]}, "recomputed has 1 entries: wanted 2, one for each stage"),
        ({"recomputed": [5, 5]}, "recomputed of stage 0 is 5"),
        ({"recomputed": [0, {3}]}, r"recomputed of stage 1 is \{3\}: .* some of the micro-batches 0 to 2"),
        ({"recomputed": [0, True]}, "recomputed of stage 1 is True"),
        ({"recomputed": [0, "01"]}, "recomputed of stage 1 is '01'"),
        ({"costs": Costs([1, 2, 3])}, "forward has 3 numbers: wanted 2"),
        ({"seconds": 0}, "seconds is 0: wanted a positive number"),
        ({"seconds": float("inf")}, "seconds is inf: wanted a positive number that is not infinite"),
        ({"iterations": 0}, "iterations is 0: wanted an integer of at least 1"),
    ],
)
def test_refuses(arguments: dict[str, object], message: str) -> None:
    usual = {"placement": (0, 1), "micro_batches": 3}
    with pytest.raises(ValueError, match=message):
        synthesize(**usual | arguments)  # type: ignore[arg-type]


def test_refuses_wrong_types() -> None:
    with pytest.raises(TypeError, match="seeds has '1f1b': wanted a Schedule"):
        synthesize((0, 1), 3, seeds=["1f1b"])  # type: ignore[list-item]
    for recomputed in ({0, 1}, {0: 1, 1: 1}):
        with pytest.raises(TypeError, match="wanted a sequence with an entry for each stage"):
            synthesize((0, 1), 3, recomputed=recomputed)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seconds is '1': wanted a number"):
        synthesize((0, 1), 3, seconds="1")  # type: ignore[arg-type]


@pytest.mark.thorough
def test_windows_help_with_measured_numbers() -> None:
    pytest.importorskip("ortools")
    draws = Random(1)
    placement = wave_placement(3, 2)
    inputs, weights = ([draws.uniform(0.2, 0.9) for _ in placement] for _ in range(2))
    activation = [draws.uniform(0.9, 1.1) * 1.7e9 for _ in placement]
    costs = Costs(0.5, None, None, inputs, weights, transfer=0.0123, activation=activation)
    limit = 4.1e9 * 1.7
    found = synthesize(placement, 8, costs, memory_limit=limit, iterations=12)
    assert max(found.simulation.peak_memory) <= limit * (1 + 1e-9)
    assert "solver" in found.found_by or "window search" in found.found_by
