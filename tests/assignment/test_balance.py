import re

import pytest
import torch
from torch import nn

from pipework.assignment.balance import checked_balance, estimated_costs


@pytest.mark.parametrize("balance", [[1, 2], (1, 2), torch.tensor([1, 2])])
def test_integers_of_any_make_that_sum_to_the_layers(balance):
    assert checked_balance(balance, 3) == [1, 2]


@pytest.mark.parametrize(
    "balance", [[], [3, 1], [1, 1], [0, 3], [-1, 4], [1.0, 2.0], [True, 2], ["3"], [1, 1, 1, 1], [None, 3]]
)
def test_the_error_says_the_right_sum_and_shows_a_line_that_runs(balance):
    with pytest.raises(ValueError, match="positive integers that sum to 3") as caught:
        checked_balance(balance, 3)
    assert str(balance) in str(caught.value)
    names = {"module": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU()), "sample": torch.rand(2, 2)}
    for line in re.findall(r"^    (.*)$", str(caught.value), re.MULTILINE):
        exec(line.replace("sample)", "sample, timeout=0)"), names)
    assert sum(names["balance"]) == 3


@pytest.mark.parametrize("balance", [2, "auto", b"12", 1.5])
def test_a_balance_that_is_no_list(balance):
    with pytest.raises(TypeError, match=rf"positive integers that sum to 5, the number of layers, got {balance!r}"):
        checked_balance(balance, 5)


def test_counts_elements_that_take_part_in_arithmetic():
    block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    module = nn.Sequential(nn.Embedding(1000, 4), block, nn.Conv2d(2, 3, 5), nn.Identity())
    assert estimated_costs(module) == [1, 41 + 1 + 37, 3 * 2 * 25 + 3 + 1, 1]


def test_a_tied_weight_costs_where_it_is_multiplied():
    embedding, output = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    output.weight = embedding.weight
    assert estimated_costs(nn.Sequential(embedding, output)) == [1, 41]


def test_parameters_of_modules_with_children_count_too():
    attention = nn.MultiheadAttention(4, 1)
    assert estimated_costs(nn.Sequential(attention)) == [sum(p.numel() for p in attention.parameters()) + 1]


def test_the_same_layer_twice_costs_twice():
    layer = nn.Linear(2, 2)
    assert estimated_costs(nn.Sequential(layer, nn.ReLU(), layer)) == [7, 1, 7]


@pytest.mark.parametrize("lazy", [nn.LazyLinear(3), nn.LazyBatchNorm1d()])
def test_a_lazy_layer_must_have_run(lazy):
    module = nn.Sequential(nn.ReLU(), lazy)
    with pytest.raises(ValueError, match=r"'1.weight' is lazy and has no shape yet: run one batch"):
        estimated_costs(module)
    module(torch.rand(2, 4))
    assert len(estimated_costs(module)) == 2
