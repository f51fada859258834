"""Which modules are units."""

import pytest
from torch import nn

from pipework.model.parts.units import find_units


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.second(self.first(x))


class Stage(nn.Module):
    """A container with a list inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Net(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        return x


def test_elements_of_lists_and_what_stands_beside_them() -> None:
    model = Net(stem=nn.Linear(4, 4), stage=Stage(), head=nn.Linear(4, 4))
    assert list(find_units(model)) == ["stem", "stage.blocks.0", "stage.blocks.1", "stage.norm", "head"]


def test_only_the_outermost_lists_count() -> None:
    nested = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
    assert list(find_units(Net(stages=nested))) == ["stages.0.0", "stages.0.1", "stages.1.0"]
    assert list(find_units(Net(stages=nn.ModuleList([Stage(), Stage()])))) == ["stages.0", "stages.1"]
    assert list(find_units(Net(towers=nn.ModuleDict({"a": nn.Sequential(Block(), Block()), "b": Block()})))) == [
        "towers.a.0", "towers.a.1", "towers.b",
    ]  # fmt: skip


def test_a_module_of_several_names_is_found_once() -> None:
    block = Block()
    assert list(find_units(Net(blocks=nn.ModuleList([block, Block(), block]), same=block))) == ["blocks.0", "blocks.1"]


def test_a_unit_with_most_of_the_parameters_is_opened() -> None:
    assert list(find_units(Net(backbone=Net(a=Block(), b=Block()), head=nn.Linear(4, 1)))) == [
        "backbone.a", "backbone.b", "head",
    ]  # fmt: skip
    assert list(find_units(Net(backbone=nn.TransformerEncoderLayer(4, 1), head=nn.Linear(4, 1)))) == [
        "backbone", "head",
    ]  # fmt: skip


def test_chosen_classes() -> None:
    model = Net(stage=Stage(), head=nn.Linear(4, 4))
    assert list(find_units(model, [Stage])) == ["stage", "head"]
    assert list(find_units(model, ["Block", nn.LayerNorm])) == [
        "stage.blocks.0", "stage.blocks.1", "stage.norm", "head",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="Net has no module of the classes Conv2d, Attention; it has Block"):
        find_units(model, [nn.Conv2d, "Attention"])
