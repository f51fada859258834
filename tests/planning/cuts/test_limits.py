import dataclasses
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipework.planning.cuts import CutProblem, best_cut, smallest_limit
from pipework.planning.cuts.limits import check_layers
from tests.planning.cuts.problems import every_cut, problems


@pytest.mark.parametrize("kind", ["linear", "v", "other"])
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_smaller_factor_is_enough(kind: str, data: st.DataObject) -> None:
    problem = data.draw(problems(kind))
    assume(problem.limits is not None)
    found = smallest_limit(problem)
    cuts = every_cut(dataclasses.replace(problem, limits=None))
    shares = [max(size / limit for size, limit in zip(cut.memory, problem.limits, strict=True)) for cut in cuts]
    assert found.factor == pytest.approx(min(shares), rel=1e-12)
    assert found.bound == found.factor
    of_cut = max(size / limit for size, limit in zip(found.cut.memory, problem.limits, strict=True))
    assert of_cut == pytest.approx(found.factor, rel=1e-12)


def test_limits_of_that_size_are_enough() -> None:
    problem = CutProblem((0, 1, 2), [[1] * 10] * 3, [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]] * 3, limits=[8, 16, 4])
    found = smallest_limit(problem)
    assert found.factor > 1
    enough = dataclasses.replace(problem, limits=[limit * found.factor for limit in problem.limits])
    assert best_cut(enough).cut.balance == found.cut.balance
    with pytest.raises(ValueError, match="no cut"):
        best_cut(dataclasses.replace(problem, limits=[limit * found.factor * 0.999 for limit in problem.limits]))


def test_an_infinite_limit_takes_what_the_others_cannot() -> None:
    problem = CutProblem((0, 1), [[1] * 4] * 2, [[4] * 4] * 2, limits=[2, math.inf])
    assert smallest_limit(problem).cut.balance == (1, 3)
    assert smallest_limit(problem).factor == 2


def test_there_must_be_limits() -> None:
    with pytest.raises(ValueError, match="limits is None"):
        smallest_limit(CutProblem((0,), [[1]]))


def test_a_layer_that_is_too_large_is_named() -> None:
    problem = CutProblem((0, 1), [[1, 1, 1]] * 2, [[1, 6, 1], [1, 5, 1]], limits=[5, 4.5])
    with pytest.raises(ValueError, match=r"layer 1 is too large for every worker: 5 bytes .* on stage 1, .* 4\.5"):
        best_cut(problem)
    check_layers(dataclasses.replace(problem, limits=[6, 1]))
