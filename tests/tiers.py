"""Which tests `make test` runs, which ones `make test-thorough`, and which ones only `make test-all`.

* Tests marked `slow` run only with `make test-all`.
* Tests marked `thorough` run with `make test-thorough`, and so in `.ci/run`. Some have the mark in their file, and this
  module gives it to others.
* All other tests run with `make test`.
* Tests marked `gpu` are skipped in all of these without an accelerator, and `tests/accelerator` is left out:
  `make test-accelerator` runs both, in processes whose accelerator is simulated.

There are three rules, and all give the same choice each time:

* Of a test's cases, enough stay in `make test` that each value of each parameter occurs in one of them.
* Of a test's other cases, a seeded choice of a few runs with `make test-thorough`, the rest with `make test-all`.
* Of the tests in a file that start processes, the first one stays in `make test`.

A test that marks some of its cases `thorough` itself is left as it is.
"""

import itertools
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

A_FEW = 12  # cases of a test, beside those of `make test`
RARELY = 24  # slow cases of a row, see `sampled`
STARTING = {"launch", "originals_process", "start", "start_python"}  # fixtures that start processes


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Marks what `make test` leaves out."""
    tests = grouped(
        (item for item in items if isinstance(item, pytest.Function) and "slow" not in item.keywords), test_of
    )
    chosen = [cases for cases in tests.values() if not any("thorough" in case.keywords for case in cases)]
    for cases in chosen:
        others = repeating(cases)
        leave_out(others)
        for case in others[A_FEW:]:
            case.add_marker(pytest.mark.slow)
    starting = [case for cases in chosen for case in cases if STARTING & {*case.fixturenames}]
    for cases in grouped(starting, lambda case: str(case.path)).values():
        leave_out(cases[1:])


def test_of(case: pytest.Function) -> str:
    """The name of a case's test."""
    return case.nodeid.partition("[")[0]


def grouped(
    cases: Iterable[pytest.Function], key: Callable[[pytest.Function], str]
) -> dict[str, list[pytest.Function]]:
    """The cases of each key, in their order."""
    groups: dict[str, list[pytest.Function]] = {}
    for case in cases:
        groups.setdefault(key(case), []).append(case)
    return groups


def leave_out(cases: Iterable[pytest.Function]) -> None:
    """Marks some cases."""
    for case in cases:
        case.add_marker(pytest.mark.thorough)


def repeating(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """The cases of a test that have no value of a parameter which those before them, in a seeded order, have not."""
    if len(cases) == 1:
        return []
    seen: set[tuple[str, Hashable]] = set()
    others = []
    for case in random.Random(0).sample(cases, len(cases)):
        values = {(name, key_of(value)) for name, value in case.callspec.params.items()}
        if values <= seen:
            others.append(case)
        seen |= values
    return others


def key_of(value: object) -> Hashable:
    """Equal for equal values of a parameter; some of them cannot be in a set."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def one_quick(values: Iterable[Any]) -> list[Any]:
    """Values of a parameter of a test that takes seconds: `make test` runs it with the first one alone."""
    first, *others = values
    return [first, *(pytest.param(each, marks=pytest.mark.thorough) for each in others)]


def sampled(*axes: Any, each: int, whole: int = 2) -> list[Any]:
    """Combinations. Of those that agree in the first `whole` axes, a seeded choice of `each` is not slow.

    Of that choice, `make test` runs one. A larger choice is slow.
    """
    chooser = random.Random(0)
    cases = []
    for first in itertools.product(*axes[:whole]):
        others = list(itertools.product(*axes[whole:]))
        drawn = chooser.sample(others, min(len(others), each + RARELY))
        marks = [(), *[pytest.mark.thorough] * (each - 1), *[pytest.mark.slow] * RARELY]
        cases += [pytest.param(*first, *other, marks=mark) for other, mark in zip(drawn, marks, strict=False)]
    return cases
