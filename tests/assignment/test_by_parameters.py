import pytest
import torch
from torch import nn

from pipework.assignment.by_parameters import estimated_costs


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
