"""Which tests `make test` runs, which the rest of what guards every change, and which only `make test-all`.

* `slow`, a mark that tests have: only `make test-all` runs them.
* `thorough`, a mark that tests have, or get here: `make test-thorough` runs them, and so does `.ci/run`.
* All others: `make test`.

Of a test with many cases some stay in `make test`: enough that each value of each parameter is in one of them. Which
ones is always the same. A test that marks cases of its own as `thorough` has chosen, and is left as it is.
"""

import random
from collections.abc import Hashable, Iterable, Sequence

import pytest


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Marks the cases of each test that `make test` leaves out."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "slow" not in item.keywords:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        if not any("thorough" in case.keywords for case in cases):
            for case in left_out(cases):
                case.add_marker(pytest.mark.thorough)


def left_out(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """The cases that have no value of a parameter which those before them, in a seeded order, lack."""
    seen: set[tuple[str, Hashable]] = set()
    others = []
    for case in random.Random(0).sample(cases, len(cases)):
        values = {(name, key_of(value)) for name, value in case.callspec.params.items()}
        if values <= seen:
            others.append(case)
        seen |= values
    return others


def key_of(value: object) -> Hashable:
    """Equal for equal values; some of them cannot be in a set."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value
