"""The bodies of other tests, unchanged, where the workers of every pipe are processes.

Each rank is a pytest that runs the same tests in the same order, with what tests/ranks.py has for it. A seeded choice
of the cases of each test is run each time, and all of them where slow tests are asked for.
"""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipework import Mesh
from tests.ranks import RankPipe

Run = Callable[..., list[Any]]

TESTS = Path(__file__).parents[2]
ENOUGH = "as many cases have passed as are wanted"
SPARE = 4  # times as many cases as are wanted are looked at, since some will be skipped


class Rank:
    """What pytest does on a rank: which tests it runs, and what became of them.

    Args:
        each: how many cases of each test are run, beside those that are skipped; None: all.
    """

    def __init__(self, each: int | None) -> None:
        self._each = each
        self._made = 0
        self._passed: Counter[tuple[Path, str]] = Counter()
        self.skipped: Counter[str] = Counter()

    @property
    def passed(self) -> int:
        return self._passed.total()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            mark = item.get_closest_marker("one_process")
            if mark is not None:
                item.add_marker(pytest.mark.skip(mark.args[0]))
        if self._each is not None:  # in any order, but in that of all ranks; and the same functions together
            random.Random(0).shuffle(items)
            cases: dict[tuple[Path, str], list[pytest.Item]] = {}
            for item in sorted(items, key=_function):
                cases.setdefault(_function(item), []).append(item)
            items[:] = [item for every in cases.values() for item in every[: SPARE * self._each]]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._made = RankPipe.made
        if self._passed[_function(item)] == self._each:
            pytest.skip(ENOUGH)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Any:
        result = yield
        assert RankPipe.made > self._made, "this test makes no pipe of processes: use Way.pipe, or mark it one_process"
        self._passed[_function(pyfuncitem)] += 1
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
            self.skipped.pop(ENOUGH, None)


def _function(item: pytest.Item) -> tuple[Path, str]:
    return item.path, item.name.partition("[")[0]


def run_tests(mesh: Mesh, files: list[str], each: int | None) -> tuple[int, dict[str, int]]:
    """On each rank."""
    rank = Rank(each)
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    marks = ["-m", ""] if each is None else []
    options = ["-x", "-q", *plugins, *marks, "--timeout=60", "--show-capture=no"]
    code = pytest.main([*options, *[str(TESTS / file) for file in files]], plugins=[rank])
    assert code == 0
    print(rank.passed, "passed, skipped are", dict(rank.skipped))
    return rank.passed, dict(rank.skipped)


FILES = [str(path.relative_to(TESTS)) for path in sorted((TESTS / "exactness").glob("test_*.py"))]

CASES = [
    pytest.param(3, 1, 35, marks=pytest.mark.thorough),
    *(pytest.param(ranks, each, 50, marks=pytest.mark.slow) for ranks in (2, 3, 4) for each in (3, 40)),
]


@pytest.mark.parametrize(("ranks", "each", "least"), CASES)
@pytest.mark.timeout(3600)
def test_the_same_bodies_pass(on_ranks: Run, ranks: int, each: int, least: int) -> None:
    results = on_ranks(ranks, run_tests, fresh=True, patience=3500, files=FILES, each=each)
    assert results == results[:1] * ranks
    assert results[0][0] > least


@pytest.mark.thorough
def test_a_few_of_the_same_bodies_pass(on_ranks: Run) -> None:
    results = on_ranks(2, run_tests, fresh=True, files=["exactness/test_modes.py"], each=3)
    assert results[0] == results[1]
    assert results[0][0] > 5
