"""The cuts that are found, compared with all cuts of small problems."""

import random
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipework.planning.cuts import CutProblem, best_cut, even_cut
from pipework.schedule.placement import loop_placement, wave_placement

PLACEMENTS = {
    "linear": [(0,), (0, 1), (0, 1, 2), (2, 0, 1), (0, 1, 2, 3)],
    "other": [
        (0, 0), (0, 1, 1, 0), (1, 0, 0, 1), (0, 1, 2, 2, 1, 0), (0, 0, 1), loop_placement(2, 2), loop_placement(3, 2),
        wave_placement(2, 4),
    ],
}  # fmt: skip


def every_cut(problem: CutProblem) -> list[list[int]]:
    inner = combinations(range(1, problem.layers), problem.stages - 1)
    return [[0, *chosen, problem.layers] for chosen in inner]


def ends(balance: tuple[int, ...]) -> list[int]:
    return [sum(balance[:stage]) for stage in range(len(balance) + 1)]


def most(problem: CutProblem, cut: list[int]) -> float:
    """The largest share of a limit, if that is above 1; then the most work of a worker."""
    held = problem.loads(cut, problem.sizes)
    return max(1.0, *(size / limit for size, limit in zip(held, problem.limits, strict=True))), max(
        problem.loads(cut, problem.work)
    )


@st.composite
def problems(draw: st.DrawFn, kind: str) -> CutProblem:
    """Small problems with whatever a problem can have."""
    placement = draw(st.sampled_from(PLACEMENTS[kind]))
    stages, workers = len(placement), max(placement) + 1
    layers = stages + draw(st.integers(0, 11 - stages))
    numbers = draw(st.sampled_from([st.integers(0, 6), st.integers(0, 12).map(lambda tenths: tenths / 10)]))

    def rows(numbers: st.SearchStrategy[float]) -> list[list[float]]:
        row = st.lists(numbers, min_size=layers, max_size=layers)
        return draw(st.one_of(row.map(lambda one: [one] * stages), st.lists(row, min_size=stages, max_size=stages)))

    memory = rows(st.integers(0, 6))
    even = sum(map(sum, memory)) / stages / workers
    shares = st.lists(st.sampled_from([0.7, 0.9, 1, 1.1, 1.5, 2, inf]), min_size=workers, max_size=workers)
    limits = [max(0.1, even * share) for share in draw(shares)] if draw(st.booleans()) else [inf] * workers
    return CutProblem(placement, rows(numbers), memory, limits)


@given(problems("other"))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_cut_has_a_smaller_largest_stage_than_the_even_one(problem: CutProblem) -> None:
    def largest(cut: list[int]) -> int:
        return max(work[end] - work[begin] for work, (begin, end) in zip(problem.work, pairwise(cut), strict=True))

    assert largest(ends(even_cut(problem))) == min(map(largest, every_cut(problem)))


@given(problems("linear"))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_cut_is_better_if_each_worker_holds_a_stage(problem: CutProblem) -> None:
    best = min(most(problem, cut) for cut in every_cut(problem))
    found = most(problem, ends(best_cut(problem)))
    assert found[0] == pytest.approx(best[0])
    assert found[1] == best[1] or best[0] > 1


def test_the_local_search_seldom_misses_the_best_cut() -> None:
    missed = []
    for seed in range(60):
        chance = random.Random(seed)
        placement = chance.choice(PLACEMENTS["other"])
        stages, workers, layers = len(placement), max(placement) + 1, chance.randrange(8, 12)
        rows = [[chance.uniform(0.5, 1.5) for _ in range(layers)] for _ in range(2)]
        limits = [chance.choice([1.2, 1.5, inf]) * sum(rows[1]) / workers for _ in range(workers)]
        problem = CutProblem(
            placement,
            [rows[0]] * stages,
            [[1000 * each for each in rows[1]]] * stages,
            [1000 * each for each in limits],
        )
        best = min(most(problem, cut) for cut in every_cut(problem))
        found = most(problem, ends(best_cut(problem)))
        missed.append(max(found[0] / best[0], found[1] / best[1] if best[0] == 1 else 0) - 1)
    assert sum(each > 1e-9 for each in missed) <= 6
    assert max(missed) < 0.1


@pytest.mark.parametrize("kind", ["linear", "V", "loop of 2"])
@pytest.mark.parametrize("unequal", [False, True])
def test_large_models_are_cut_nearly_evenly(kind: str, unequal: bool) -> None:
    workers, layers = 16, 420
    placement = {
        "linear": loop_placement(workers, 1), "V": wave_placement(workers, 2), "loop of 2": loop_placement(workers, 2),
    }[kind]  # fmt: skip
    row = [1 + (layer * 7 % 11) / 10 for layer in range(layers)]
    slow = [[2 * each for each in row] if unequal and worker % 2 else row for worker in range(workers)]
    problem = CutProblem(placement, [slow[at] for at in placement], [[1] * layers] * len(placement), [40] * workers)
    cut = ends(best_cut(problem))
    work = problem.loads(cut, problem.work)
    speeds = sum(sum(row) / sum(each) for each in slow)
    assert max(work) < 1.1 * problem.work[0][-1] / speeds
    assert max(problem.loads(cut, problem.sizes)) <= 40
    assert all(after > before for before, after in pairwise(cut))
