import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipework.assignment.minimax import minimax_on_devices, minimax_partition


def loads_of(costs, counts):
    ends = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return [sum(row[begin:end]) for row, (begin, end) in zip(costs, ends, strict=True)]


def by_trying_all(costs):
    """The best split by the definition: loads from the largest down, then few layers from the last partition on."""
    cuts = itertools.combinations(range(1, len(costs[0])), len(costs) - 1)
    splits = [[end - start for start, end in itertools.pairwise((0, *cut, len(costs[0])))] for cut in cuts]
    return min(splits, key=lambda counts: (sorted(loads_of(costs, counts), reverse=True), counts[::-1]))


@pytest.mark.parametrize(
    ("costs", "partitions", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 1, [6]),
        ([1, 2, 3, 4, 5, 6], 6, [1, 1, 1, 1, 1, 1]),
        ([9, 1, 1, 1, 1], 3, [1, 2, 2]),  # greedy parts would be [1, 4] and an empty one
        ([0, 0, 0], 2, [2, 1]),
        ([0.1, 0.2, 0.3, 0.6], 2, [3, 1]),  # 0.1 + 0.2 + 0.3 > 0.6 in floats
        ([10**6] + [1] * 400, 9, [1] + [50] * 8),
    ],
)
def test_known_splits(costs, partitions, expected):
    assert minimax_partition(costs, partitions) == expected


@st.composite
def problems(draw):
    costs = draw(st.lists(st.integers(0, 12) | st.sampled_from([0.5, 0.25, 100]), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


@given(problems())
def test_is_the_best_of_all_splits(problem):
    costs, partitions = problem
    assert minimax_partition(costs, partitions) == by_trying_all([costs] * partitions)


@given(st.lists(st.floats(0, 1e300, allow_subnormal=True), min_size=3, max_size=12))
def test_floats_of_any_size_give_a_full_split(costs):
    counts = minimax_partition(costs, 3)
    assert sum(counts) == len(costs)
    assert min(counts) >= 1


def test_equal_layers_are_split_as_tensor_split_does():
    for layers, partitions in itertools.product(range(1, 20), range(1, 7)):
        if partitions <= layers:
            pieces = torch.zeros(layers).tensor_split(partitions)
            assert minimax_partition([2.5] * layers, partitions) == [len(piece) for piece in pieces]


def test_no_split_of_unequal_devices_is_better():
    for seed in range(200):
        draw = random.Random(seed)
        layers = draw.randint(1, 8)
        costs = [[draw.choice([0, 1, 2, 3, 10, 0.1]) for _ in range(layers)] for _ in range(draw.randint(1, layers))]
        counts = minimax_on_devices(costs)
        assert sum(counts) == layers
        assert min(counts) >= 1
        found, best = (sorted(loads_of(costs, each), reverse=True) for each in (counts, by_trying_all(costs)))
        assert found == pytest.approx(best), seed


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([], "at least 1, got 0"),
        ([[1, 2]] * 3, "cannot make 3 partitions of 2 layers"),
        ([[1, -1], [1, 1]], "got -1 for layer 1"),
        ([[1, 1], [1, math.nan]], "got nan for layer 1"),
        ([[math.inf]], "got inf for layer 0"),
    ],
)
def test_bad_costs_are_named(costs, message):
    with pytest.raises(ValueError, match=message):
        minimax_on_devices(costs)
