import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipework.planning.cuts import CutProblem, cut_at, neighbours
from tests.planning.cuts.problems import every_cut, problems


def test_loads_and_memory_of_a_cut() -> None:
    boundary = [[10, 20, 30], [100, 200, 300], [1000, 2000, 3000]]
    problem = CutProblem((0, 1, 1, 0), [[1, 2, 3, 4]] * 4, [[5, 6, 7, 8]] * 4, boundary=boundary)
    cut = cut_at(problem, [1, 1, 1, 1])
    assert cut.loads == (1 + 4 + 10 + 3000, 2 + 3 + 10 + 3000)  # nothing is sent between the stages of worker 1
    assert cut.memory == (13, 13)
    assert cut.bottleneck == 3015


def test_equal_loads_are_equal_numbers() -> None:
    problem = CutProblem((0, 1), [[0.1, 0.2, 0.3, 0.3, 0.2, 0.1]] * 2)
    first, second = cut_at(problem, [3, 3]).loads
    assert first == second


@pytest.mark.parametrize("balance", [[1, 2], [2, 2, 0], [1, 1, 3], [1, 1, 1, 1]])
def test_the_balance_is_checked(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="wanted 3 positive numbers, the layers of each stage, that add up to 4"):
        cut_at(CutProblem((0, 1, 2), [[1] * 4] * 3), balance)


@given(st.one_of(problems("linear"), problems("v"), problems("other")))
@settings(max_examples=40, deadline=None)
def test_neighbours_are_all_cuts_with_one_boundary_moved(problem: CutProblem) -> None:
    cuts = every_cut(problem)

    def near(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
        changed = [stage for stage in range(problem.stages) if first[stage] != second[stage]]
        return len(changed) == 2 and changed[1] == changed[0] + 1 and abs(first[changed[0]] - second[changed[0]]) == 1

    for cut in cuts[:3]:
        found = list(neighbours(cut))
        assert all(each in cuts for each in found)
        assert {each.balance for each in found} == {each.balance for each in cuts if near(cut.balance, each.balance)}
