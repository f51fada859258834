import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pipework.planning.cuts import CutProblem, best_cut, best_cuts, bottleneck_bound, cut_at
from pipework.planning.cuts.best import rank
from pipework.planning.cuts.cut import fits
from tests.planning.cuts.problems import descending, every_cut, problems

SLOW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def check_against_all(problem: CutProblem) -> None:
    cuts = every_cut(problem)
    if not cuts:
        with pytest.raises(ValueError, match=r"no cut of|too large for every worker"):
            best_cuts(problem)
        return
    best = min(cuts, key=rank)
    found = best_cut(problem)
    assert found.cut.bottleneck == best.bottleneck == found.bound
    assert bottleneck_bound(problem) <= best.bottleneck
    chosen = best_cuts(problem, count=4)
    assert chosen[0].bottleneck == best.bottleneck
    assert chosen == sorted(chosen, key=rank)
    assert len({cut.balance for cut in chosen}) == len(chosen) <= 4
    assert {cut.balance for cut in chosen} <= {cut.balance for cut in cuts}


@pytest.mark.parametrize("kind", ["linear", "v", "other"])
@given(st.data())
@SLOW
def test_the_first_has_the_smallest_bottleneck_of_all_cuts(kind: str, data: st.DataObject) -> None:
    check_against_all(data.draw(problems(kind)))


@pytest.mark.parametrize("kind", ["linear", "v"])
@given(st.data())
@SLOW
def test_the_first_is_the_fairest_of_all_cuts(kind: str, data: st.DataObject) -> None:
    problem = data.draw(problems(kind))
    cuts = every_cut(problem)
    assume(cuts)
    assert descending(best_cut(problem).cut) == min(map(descending, cuts))


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_some_cuts_give_less_to_the_first_worker_or_the_last(placement: tuple[int, ...]) -> None:
    problem = CutProblem(placement, [[2 + layer % 3 for layer in range(30)]] * len(placement))
    first, *others = best_cuts(problem, count=8)
    assert len(others) == 7
    for worker in {placement[0], placement[-1]}:
        assert min(cut.loads[worker] for cut in others) < first.loads[worker]
    assert others[-1].bottleneck < 1.5 * first.bottleneck


def test_all_cuts_are_found_where_there_are_few() -> None:
    problem = CutProblem((0, 1), [[1, 2, 3, 4]] * 2)
    assert [cut.balance for cut in best_cuts(problem)] == [(3, 1), (2, 2), (1, 3)]
    assert len(best_cuts(problem, count=1)) == 1


def test_workers_may_have_any_number() -> None:
    seconds = [[1, 1, 1, 1], [3, 3, 3, 3]]
    assert best_cut(CutProblem((1, 0), seconds)).cut.loads == (3, 3)
    assert best_cut(CutProblem((0, 1), seconds)).cut.balance == (3, 1)
    limited = CutProblem((1, 0), [[1] * 4] * 2, [[1] * 4] * 2, limits=[3, 1])
    assert best_cut(limited).cut.balance == (1, 3)


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_limits_that_are_too_small_are_named(placement: tuple[int, ...]) -> None:
    stages = len(placement)
    problem = CutProblem(placement, [[1] * 8] * stages, [[1] * 8] * stages, limits=[3, 4])
    with pytest.raises(ValueError, match=r"limits \[3, 4\]: .* are 1\.25 times as large"):
        best_cuts(problem)


def test_a_large_model_with_v_placement_is_cut_near_its_bound() -> None:
    rows = [[1 + (layer * 7 % 11) / 10 for layer in range(420)]] * 32
    problem = CutProblem((*range(16), *reversed(range(16))), rows)
    found = best_cut(problem)
    assert fits(found.cut)
    assert bottleneck_bound(problem) <= found.bound <= found.cut.bottleneck < 1.02 * found.bound
    assert found.cut == cut_at(problem, found.cut.balance)


def test_the_number_of_cuts_is_checked() -> None:
    with pytest.raises(ValueError, match="count is 0: wanted at least 1"):
        best_cuts(CutProblem((0,), [[1]]), count=0)
