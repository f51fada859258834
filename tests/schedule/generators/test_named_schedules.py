"""What holds for every schedule that has a name: it is valid, whole, within its memory, and what it was yesterday."""

from fractions import Fraction
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import SCHEDULES, Costs, build, simulate, validate
from tests.schedule.orders_text import to_orders_text

GOLDEN = Path(__file__).with_name("golden.txt")
HALVES = {"zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min"}


def counts(name):
    """The numbers of stages per worker to try."""
    if not SCHEDULES[name].any_stages_per_worker:
        return (SCHEDULES[name].stages_per_worker,)
    return (2, 4) if name == "hanayo" else (1, 2, 3)


def longest_round(p, m):
    """Of rounds that differ by one at most, and have p micro-batches or more."""
    return m if m < p else -(-m // (m // p))


# Of p workers, v stages per worker and m micro-batches: how many micro-batches of a worker's share of activations
# a worker holds at most.
MEMORY = {
    "gpipe": lambda p, v, m: m,
    "fill-drain": lambda p, v, m: m,
    "1f1b": lambda p, v, m: min(m, p),
    "eager-1f1b": lambda p, v, m: min(m, 2 * p - 1),
    "interleaved-1f1b": lambda p, v, m: min(m, (2 * (p - 1) + (v - 1) * longest_round(p, m) + 1) / v),
    "looped-bfs": lambda p, v, m: m,
    "hanayo": lambda p, v, m: min(m, (p if v == 2 else longest_round(p, m)) + (p - 1) / v),
    "zb-h1": lambda p, v, m: min(m, p),
    "zb-h2": lambda p, v, m: min(m, 2 * p - 1),
    "interleaved-zb": lambda p, v, m: min(m, p),
    "zb-v": lambda p, v, m: min(m, p),
    "v-half": lambda p, v, m: min(m, (p + 2) // 2),
    "v-min": lambda p, v, m: min(m, (p + 4) // 3),
    "dualpipe-v": lambda p, v, m: min(m, p + 1 / 2),
    "forward-only": lambda p, v, m: 1 / v,
}


def check_whole(schedule, name, p, v, m):
    assert schedule.placement == SCHEDULES[name].placement(p, v)
    assert (schedule.workers, schedule.stages, schedule.micro_batches) == (p, p * v, m)
    # Validation looks at whether each forward and each backward is there once.
    kinds = "F" if name == "forward-only" else "FIW" if name in HALVES else "FBIW" if name == "dualpipe-v" else "FB"
    assert schedule.kinds <= set(kinds)


def check(name, p, v, m, costs=None):
    schedule = build(name, workers=p, chunks=m, stages_per_worker=v, costs=costs)
    check_whole(schedule, name, p, v, m)
    validation = validate(schedule)
    assert validation.ok
    assert validation.ascending
    peak = max(simulate(schedule, Costs(activation=1)).peak_memory)
    assert Fraction(peak) / v <= Fraction(MEMORY[name](p, v, m)).limit_denominator(100)


def test_every_name_has_a_formula():
    assert set(MEMORY) == set(SCHEDULES)


@pytest.mark.parametrize("v", range(5))
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_size(name, v):
    if v not in counts(name):
        return
    for p in range(1, 9):
        for m in (1, 2, 3, 5, 8, 13, 20):
            check(name, p, v, m)


times = st.floats(0.125, 4)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 20), st.data())
def test_any_costs(name, p, m, data):
    """Memory keeps its limit whatever the costs, since it is counted, not timed."""
    v = data.draw(st.sampled_from(counts(name)))
    forward, half = (data.draw(st.lists(times, min_size=p * v, max_size=p * v)) for _ in range(2))
    costs = Costs(forward, weight_gradient=half, transfer=data.draw(times))
    check(name, p, v, m, costs if data.draw(st.booleans()) else None)


def golden():
    """A line for each size: how many actions, and the beginning of the hash of the orders as text."""
    for name in SCHEDULES:
        for p, m in ((1, 1), (2, 3), (2, 8), (3, 7), (4, 4), (4, 8), (4, 18), (8, 6), (8, 20)):
            for v in counts(name):
                schedule = build(name, workers=p, chunks=m, stages_per_worker=v)
                digest = sha256(to_orders_text(schedule).encode()).hexdigest()[:12]
                yield f"{name:16} p={p} v={v} m={m:<2} {sum(map(len, schedule.orders)):5} actions  {digest}"


def test_orders_are_what_they_were():
    """A change of an order is a change for users, so it is made on purpose. Then this writes the file anew:

    from tests.schedule.generators.test_named_schedules import GOLDEN, golden

    print(*golden(), sep="\\n", file=GOLDEN.open("w"))
    """
    assert GOLDEN.read_text().splitlines() == list(golden())
