"""What `make test` leaves out of a test's cases: none whose parameters have a value that occurs nowhere else."""

import itertools
from types import SimpleNamespace
from typing import Any

from tests.tiers import repeating, sampled


def cases_of(**axes: list[Any]) -> list[Any]:
    products = itertools.product(*axes.values())
    return [SimpleNamespace(callspec=SimpleNamespace(params=dict(zip(axes, each, strict=True)))) for each in products]


def test_each_value_stays() -> None:
    axes = {"way": ["gpipe", "1f1b", "zb-v"], "balance": [[1, 2], [3], [2, 1], []], "rows": [1, True, 1.0, None]}
    cases = cases_of(**axes)
    left_out = {id(case) for case in repeating(cases)}
    stay = [case.callspec.params for case in cases if id(case) not in left_out]
    for name, values in axes.items():
        assert {repr(each[name]) for each in stay} == {*map(repr, values)}
    assert 4 <= len(stay) <= 9
    assert {id(case) for case in repeating(cases)} == left_out


def test_a_single_parameter_keeps_all() -> None:
    assert repeating(cases_of(seed=[*range(20)])) == []


def test_each_row_of_the_grid_stays_once() -> None:
    cases = sampled("ab", "xyz", range(5), range(2), each=3)
    for row in itertools.product("ab", "xyz"):
        marks = [case.marks for case in cases if case.values[:2] == row]
        assert len(marks) == 10
        assert marks.count(()) == 1
        assert sum("thorough" in str(each) for each in marks) == 2
