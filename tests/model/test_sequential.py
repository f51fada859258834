import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from pipework import Pipe, PipeSequential, WithDevice
from pipework.model.sequential import TupleRule


class Call(nn.Module):
    """A layer that does what it is told."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def twins(x):
    return x, 10 * x


def test_a_tuple_becomes_positional_arguments():
    model = PipeSequential(Call(twins), Call(lambda x, y: (y, x, None)), Call(lambda y, x, nothing: (y - x, nothing)))
    assert model(torch.tensor(1)) == (9, None)
    assert PipeSequential(Call(lambda x: (x,)), Call(lambda x: (x + 1,)))(torch.tensor(1)) == (2,)


def test_without_layers_the_input_comes_back_and_slices_are_of_the_class():
    x, y = torch.ones(1), torch.zeros(1)
    assert PipeSequential()(x) is x
    assert PipeSequential()(x, y) == (x, y)
    model = PipeSequential(OrderedDict(split=Call(twins), join=Call(lambda x, y: x + y), tuples=nn.Identity()))
    assert type(model[:2]) is PipeSequential
    assert copy.deepcopy(model)[:2](torch.tensor(2)) == 22
    assert Pipe(model, devices=["cpu"])(torch.ones(1)) == 11, "a layer may have any name"


class OneAndOptions(nn.Module):
    def forward(self, x, *, scale=1):
        return x


class Any(nn.Module):
    def forward(self, *inputs):
        return inputs


@pytest.mark.parametrize(
    ("layer", "others", "whole"),
    [
        (nn.Linear(1, 1), 0, True),
        (nn.Bilinear(1, 1, 1), 0, False),
        (nn.Bilinear(1, 1, 1), 1, True),
        (OneAndOptions(), 0, True),
        (Any(), 0, False),
    ],
)
def test_the_signature_decides(layer: nn.Module, others: int, whole: bool) -> None:
    rule = TupleRule.BY_SIGNATURE
    assert rule.keeps_whole(layer, others) == whole
    assert rule.arguments((1, 2), layer, others) == (((1, 2),) if whole else (1, 2))


def test_a_compiled_layer_has_its_signature_and_other_rules_ignore_it() -> None:
    assert TupleRule.BY_SIGNATURE.keeps_whole(torch.compile(nn.Linear(1, 1), backend="eager"))
    for layer in (nn.Linear(1, 1), nn.Bilinear(1, 1, 1)):
        assert TupleRule.SPREAD.arguments((1, 2), layer) == (1, 2)
        assert TupleRule.WHOLE.arguments((1, 2), layer) == ((1, 2),)


def test_it_runs_the_layer_with_all_arguments() -> None:
    layer = nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 1, 4)
    wrapped = WithDevice(layer, "cpu")
    torch.testing.assert_close(wrapped(x, x, x, need_weights=False), layer(x, x, x, need_weights=False))
