"""What a forward keeps on modules is found, and put back."""

import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from pipework.model.parts.analysis.refusal import CannotCut
from pipework.model.parts.analysis.state import KeptState, changed_numbers, put_back


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
    with put_back(module):
        module.steps, module.new, module.inner.extra = 3, 4, 5
        module.seen.append(2)
        module.table.clear()
    assert (module.steps, module.seen, module.table) == (0, [1], {"a": 1})
    assert (module.seen is seen, module.table is table) == (True, True)
    assert not hasattr(module, "new")
    assert not hasattr(module.inner, "extra")


def test_numbers_that_have_changed() -> None:
    module = Keeping()
    before = {"steps": 0, "name": "b", "gone": 3}
    assert changed_numbers(module, before) == ["name"]
    module.steps = False
    assert changed_numbers(module, before) == ["steps", "name"]


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
        (assign("mean", torch.ones(2)), "keeps a state in self.mean"),
        (assign("last", [torch.ones(2)]), "keeps a state in self.last"),
        (lambda model: model.seen.append(2), "keeps a state in self.seen"),
        (lambda model: model.seen.__setitem__(0, 2), "keeps a state in self.seen"),
        (lambda model: model.table.update(a=torch.ones(2)), "keeps a state in self.table"),
        (lambda model: setattr(model.space, "last", torch.ones(2)), "keeps a state in self.space"),
        (lambda model: setattr(model.inner, "mask", None), "sets inner.mask from outside of the unit inner"),
    ],
    ids=["number", "buffer", "list of tensors", "list", "item", "dict", "object", "unit"],
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
    model = Keeping()
    model.config = Guarded()
    KeptState({}, {"": model}).refuse_changes("Keeping", lambda tensor: True)
