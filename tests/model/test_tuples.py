"""When a tuple becomes the positional arguments of a layer."""

import pytest
import torch
from torch import nn

from pipework.model.tuples import TupleRule


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


def test_the_signature_of_a_compiled_layer_is_that_of_the_layer() -> None:
    assert TupleRule.BY_SIGNATURE.keeps_whole(torch.compile(nn.Linear(1, 1), backend="eager"))


@pytest.mark.parametrize("layer", [nn.Linear(1, 1), nn.Bilinear(1, 1, 1)])
def test_other_rules_ignore_the_signature(layer: nn.Module) -> None:
    assert TupleRule.SPREAD.arguments((1, 2), layer) == (1, 2)
    assert TupleRule.WHOLE.arguments((1, 2), layer) == ((1, 2),)


@pytest.mark.parametrize("value", [1, [1, 2], torch.Size([1, 2])])
def test_only_plain_tuples_are_spread(value: object) -> None:
    assert TupleRule.SPREAD.arguments(value, nn.Identity()) == (value,)
