import random
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipework.attached import to_sequential
from pipework.model.parts.side_effects import KeptState, generators_put_back, put_back
from pipework.model.parts.trace import CannotCut
from tests.model.parts.models import WIDTH


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.name, self.seen, self.table = 0, "a", [1], {"a": 1}
        self.space = types.SimpleNamespace(last=None)
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))


def test_attributes_are_put_back() -> None:
    module = Keeping()
    seen, table = module.seen, module.table
    with put_back([module], values=True):
        module.steps, module.new, module.inner.extra = 3, 4, 5
        module.seen.append(2)
        module.table.clear()
        module.mean.fill_(2.0)
    assert torch.equal(module.mean, torch.zeros(2))
    assert (module.steps, module.seen, module.table) == (0, [1], {"a": 1})
    assert (module.seen is seen, module.table is table) == (True, True)
    assert not hasattr(module, "new")
    assert not hasattr(module.inner, "extra")


def keep(change: Any, followed: bool = True) -> None:
    model = Keeping()
    unit = model.inner
    state = KeptState({"inner": unit}, {"": model})
    change(model)
    state.refuse_changes("Keeping", lambda tensor: followed)


def assign(name: str, value: Any) -> Any:
    return lambda model: setattr(model, name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (assign("steps", 1), "keeps a state in self.steps"),
        (assign("steps", False), "keeps a state in self.steps"),
        (assign("mean", torch.ones(2)), "keeps a state in self.mean"),
        (assign("last", [torch.ones(2)]), "keeps a state in self.last"),
        (lambda model: model.seen.append(2), "keeps a state in self.seen"),
        (lambda model: model.seen.__setitem__(0, 2), "keeps a state in self.seen"),
        (lambda model: model.table.update(a=torch.ones(2)), "keeps a state in self.table"),
        (lambda model: setattr(model.space, "last", torch.ones(2)), "keeps a state in self.space"),
        (lambda model: setattr(model.inner, "mask", None), "sets inner.mask from outside of the unit inner"),
    ],
    ids=["number", "kind of number", "buffer", "list of tensors", "list", "item", "dict", "object", "unit"],
)
def test_a_state_is_refused(change: Any, message: str) -> None:
    with pytest.raises(CannotCut, match=f"Keeping's forward {message}"):
        keep(change)


@pytest.mark.parametrize("change", [assign("mask", torch.ones(2)), assign("kind", "b"), lambda model: None])
def test_what_each_part_may_keep(change: Any) -> None:
    keep(change, followed=False)


@dataclass
class Guarded:
    size: int = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "size":
            raise ValueError("the size is that of each layer")
        return super().__getattribute__(name)


def test_an_object_that_refuses_to_give_an_attribute_is_left_alone() -> None:
    keep(assign("config", Guarded()))


REFUSED = ("after", "twice", "glue", "glue in place")
CUTTABLE = ("before", "returned", "glue, returned")


class Net(nn.Module):
    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = nn.Sequential(nn.ReLU(inplace=True))
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y, reads = self.layers[0](x), self.reads
        early = y * 2
        if reads.startswith("glue"):
            y = y.mul_(2) if reads == "glue in place" else y + 1
        z = self.act(y)
        if reads == "twice":
            z = self.act(y)
        z = self.layers[1](z)
        if reads == "before":
            z = z + early
        return self.layers[2](z + y if reads in ("after", "glue", "glue in place") else z)


@pytest.mark.parametrize("reads", [*REFUSED, *CUTTABLE])
def test_of_a_change_in_place_the_result_is_read(reads: str) -> None:
    value = x = torch.randn(2, WIDTH)
    model = Net(reads)
    if reads in REFUSED:
        with pytest.raises(CannotCut, match=r"act.0#0 changes in place what Net's forward reads again"):
            to_sequential(model, x)
    else:
        for part in to_sequential(model, x, balance=[1, 1, 1]):
            value = part(value)
        assert torch.equal(value, model(x))


def test_what_was_drawn_from_is_put_back_and_named() -> None:
    for draw, names in ((random.random, ["random"]), (np.random.rand, ["numpy.random"]), (float, [])):
        with generators_put_back() as drawn:
            value = draw()
        assert drawn == names
        assert draw() == value


class Blocks(nn.Module):
    """Does something between its blocks."""

    def __init__(self, between) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block, x)
        return x


def test_forwards_that_draw_from_numpy_or_leave_out_layers_at_random_are_refused() -> None:
    model = Blocks(lambda block, x: block(x) * float(np.random.rand()))
    with pytest.raises(ValueError, match=r"Blocks's forward draws numbers from numpy\.random, outside of the units"):
        to_sequential(model, torch.ones(2, 4))

    def between(block: nn.Module, x: Tensor, probability: float = 0.1) -> Tensor:
        return x if torch.rand([]) < probability else block(x)

    with pytest.raises(ValueError, match=r"decides with random numbers which units it calls \(blocks.0, blocks.1"):
        to_sequential(Blocks(between), torch.ones(2, 4))
    assert len(to_sequential(Blocks(lambda block, x: between(block, x, 0.0)), torch.ones(2, 4))) == 3
