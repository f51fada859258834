import itertools
import random

import pytest

from pipework.assignment.minimax import minimax_partition
from pipework.assignment.mixed import minimax_on_devices


def loads_of(costs, counts):
    ends = list(itertools.accumulate(counts, initial=0))
    return [sum(row[begin:end]) for row, (begin, end) in zip(costs, itertools.pairwise(ends), strict=True)]


def best_by_trying_all(costs):
    partitions, layers = len(costs), len(costs[0])
    cuts = itertools.combinations(range(1, layers), partitions - 1)
    splits = ([b - a for a, b in itertools.pairwise((0, *cut, layers))] for cut in cuts)
    return min(sorted(loads_of(costs, split), reverse=True) for split in splits)


@pytest.mark.parametrize("seed", range(200))
def test_no_split_is_better(seed):
    draw = random.Random(seed)
    layers = draw.randint(1, 8)
    partitions = draw.randint(1, layers)
    costs = [[draw.choice([0, 1, 2, 3, 10, 0.1]) for _ in range(layers)] for _ in range(partitions)]
    counts = minimax_on_devices(costs)
    assert sum(counts) == layers
    assert min(counts) >= 1
    assert sorted(loads_of(costs, counts), reverse=True) == pytest.approx(best_by_trying_all(costs))


def test_a_slow_device_in_the_middle_gets_the_small_layer_even_if_the_first_could_have_taken_it():
    fast, slow = [4, 1, 8, 4], [40, 10, 80, 40]
    assert minimax_on_devices([fast, slow, fast]) == [1, 1, 2]


def test_equal_devices_are_as_good_as_the_split_without_devices():
    draw = random.Random(0)
    costs = [draw.random() for _ in range(60)]
    counts = minimax_on_devices([costs] * 7)
    assert sorted(loads_of([costs] * 7, counts)) == sorted(loads_of([costs] * 7, minimax_partition(costs, 7)))


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([], "at least 1, got 0"),
        ([[1], [1]], "cannot make 2 partitions of 1 layers"),
        ([[1, 2], [1]], r"rows of \[1, 2\]"),
        ([[1, -1], [1, 1]], "got -1 for layer 1"),
        ([[1, 1], [1, float("nan")]], "got nan for layer 1"),
    ],
)
def test_bad_costs_are_named(costs, message):
    with pytest.raises(ValueError, match=message):
        minimax_on_devices(costs)
