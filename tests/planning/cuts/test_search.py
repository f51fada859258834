"""Each kind of search against the others, on problems too large to try all cuts."""

import random

import pytest

from pipework.planning.cuts import CutProblem
from pipework.planning.cuts.bisection import WEIGHT, smallest, weighted
from pipework.planning.cuts.bounds import Shares
from pipework.planning.cuts.branches import Branches
from pipework.planning.cuts.linear import linear_probe
from pipework.planning.cuts.nested import Nested
from pipework.planning.cuts.pairs import Pairs, TooManyError
from pipework.planning.cuts.search import QUICK, Effort, optimum
from pipework.planning.cuts.tables import Tables, tables_of


def tables(seed: int, placement: tuple[int, ...], layers: int) -> Tables:
    chance = random.Random(seed)
    stages, workers = len(placement), max(placement) + 1
    row = [chance.randint(1, 30) for _ in range(layers)]
    seconds = [[value * speed for value in row] for speed in chance.choices([1, 2, 3], k=workers)]
    memory = [[chance.randint(1, 9) for _ in range(layers)]] * stages
    limits = [7.5 * layers / workers] * workers
    return tables_of(CutProblem(placement, [seconds[worker] for worker in placement], memory, limits, boundary=2.0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 2, 2, 1, 0)])
def test_two_exact_searches_agree(placement: tuple[int, ...], seed: int) -> None:
    given = tables(seed, placement, 24)
    weights = [WEIGHT] * (max(placement) + 1)
    found = optimum(given, weights, Effort())
    assert found is not None
    assert found.highest == found.lowest == weighted(given, found.cut, weights)
    search = Branches(given, weights, 2_000_000)
    assert search.better(found.highest) is None
    same = search.better(found.highest + 1)
    assert same is not None
    assert weighted(given, same, weights) == found.highest


@pytest.mark.parametrize("seed", range(4))
def test_a_weight_makes_a_worker_lighter(seed: int) -> None:
    given = tables(seed, (0, 1, 2), 60)
    even = optimum(given, [WEIGHT] * 3, Effort())
    light = optimum(given, [3 * WEIGHT, WEIGHT, WEIGHT], QUICK)
    assert even is not None
    assert light is not None
    assert given.loads(light.cut)[0] < given.loads(even.cut)[0]


def test_a_probe_with_empty_stages_is_a_lower_bound() -> None:
    given = tables(0, (0, 1, 2, 3, 3, 2, 1, 0), 20)
    weights, shares = [WEIGHT] * 4, Shares(given)
    assert given.added is not None
    probes = [Nested(given, shares, given.added, empty=empty).probe for empty in (True, False)]
    relaxed, upper = (smallest(given, probe, 0, weights) for probe in probes)
    exact = optimum(given, weights, Effort())
    assert relaxed is not None
    assert upper is not None
    assert exact is not None
    assert relaxed.highest <= exact.highest <= upper.highest


def test_boundaries_that_add_the_same_everywhere_need_no_windows() -> None:
    row = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    fixed = tables_of(CutProblem((0, 1, 2), [row] * 3, boundary=1.5))
    rows = [[1.5] * 10, [1.5] * 9 + [99]]
    by_place = tables_of(CutProblem((0, 1, 2), [row] * 3, boundary=rows))
    assert fixed.added is not None
    assert by_place.added is None
    found = [smallest(each, linear_probe(each), 0, [WEIGHT] * 3) for each in (fixed, by_place)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].highest == found[1].highest


def test_exact_searches_stop_when_there_are_too_many_steps() -> None:
    given = tables(0, (0, 1, 1, 0), 24)
    weights, every = [WEIGHT] * 2, 10**9
    with pytest.raises(TooManyError):
        Pairs(given, Shares(given), weights, fairest=True, steps=10).best([every] * 2)
    with pytest.raises(TooManyError):
        Branches(given, weights, 10).better(every)
    few = optimum(given, weights, Effort(fair=0, exact=1))
    assert few is not None
    assert few.lowest <= few.highest
