"""Copies of the containers of a model, around some of its units."""

from typing import Any

import torch
from torch import Tensor, nn

from pipework.model.parts.adapter import PlainAdapter
from pipework.model.parts.analysis.units import find_units
from pipework.model.parts.execution.skeleton import Skeleton, own_attributes, refers_to_module
from pipework.model.parts.execution.unit import Container, StandIn, Unit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.scale, self.shift = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
        self.register_buffer("mask", torch.ones(2))
        self.settings = {"depth": 3}
        self.alias = [self.blocks[1]]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.shift


def copied(local: list[str], reads: list[str]) -> tuple[Net, Any]:
    model = Net()
    skeleton = Skeleton(model, find_units(model), PlainAdapter())
    return model, skeleton.copy(local, lambda name: name in reads, skeleton.stand_ins())


def test_units_here_are_twins_and_others_stand_ins() -> None:
    model, part = copied(["blocks.1"], [])
    assert [isinstance(each, Unit) for each in part.blocks] == [True] * 3
    assert [type(each) is StandIn for each in part.blocks] == [True, False, True]
    assert part.blocks[1].weight is model.blocks[1].weight
    assert part.alias[0] is part.blocks[1], "what refers to a unit refers to its twin"
    assert {id(each) for each in part.parameters()} == {id(each) for each in model.blocks[1].parameters()}


def test_a_part_has_the_parameters_that_it_reads() -> None:
    model, part = copied([], ["scale"])
    assert isinstance(part, Container)
    assert part.scale is model.scale
    assert list(part._parameters) == ["scale"]
    assert list(part.elsewhere) == ["shift"]
    assert type(part).__name__ == "Net"


def test_values_of_attributes_are_shared() -> None:
    model, part = copied([], [])
    assert part.settings is model.settings
    assert part.mask is model.mask
    assert part.alias is not model.alias


def test_hooks_of_the_model_are_not_those_of_a_part() -> None:
    model = Net()
    model.register_forward_hook(print)
    skeleton = Skeleton(model, find_units(model), PlainAdapter())
    assert not skeleton.copy([], lambda name: True, skeleton.stand_ins())._forward_hooks
    assert len(model._forward_hooks) == 1


def test_attributes() -> None:
    model = Net()
    assert own_attributes(model) == {"settings": {"depth": 3}, "alias": model.alias}
    assert refers_to_module(model.alias)
    assert refers_to_module(model.forward)
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    assert not refers_to_module([cyclic, "text", nn.Linear])
