"""Nested values that are taken apart and put together again."""

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.model.parts.execution.absent import Absent
from pipework.model.parts.execution.leaves import collect_tensors, flatten, held_by, kept, mapped, tensors_in, unflatten

ONE, TWO = torch.ones(1), torch.full((2,), 2.0)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Box:
    inside: Any
    number: int = 3


class Opaque:
    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __repr__(self) -> str:
        return "Opaque"  # no address, since it names a test


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "tree",
    [ONE, [ONE, (TWO, 3)], {"a": ONE, "b": {"c": TWO}}, Box(ONE), Box(Box([ONE, TWO])), Pair(ONE, None),
     OrderedDict(a=ONE), (None, Box(Absent.of(ONE)))],
    ids=str,
)  # fmt: skip
def test_flattened_and_put_together(tree: Any) -> None:
    leaves, form = flatten(tree)
    again = unflatten(leaves, form)
    assert type(again) is type(tree)
    assert str(again) == str(tree)
    assert all(not isinstance(leaf, Box) for leaf in leaves)


def test_a_dataclass_without_tensors_is_a_leaf() -> None:
    box = Box("text")
    assert flatten([box])[0] == [box]


def test_replaced_leaves() -> None:
    doubled = mapped(Tensor, lambda tensor: tensor * 2, {"a": Box(ONE), "b": 1})
    assert (doubled["a"].inside.item(), doubled["a"].number, doubled["b"]) == (2.0, 3, 1)
    assert mapped(Tensor, lambda tensor: tensor * 2, ONE).item() == 2.0


def test_tensors_in_a_value() -> None:
    assert tensors_in(None) == []
    assert tensors_in(ONE) == [ONE]
    assert [each is ONE for each in tensors_in({"a": Box(ONE), "b": Opaque(TWO)})] == [True]


@pytest.mark.parametrize(
    ("value", "count", "hides"),
    [
        (ONE, 1, False),
        ((1, 2.0, "text", None, torch.float32, torch.device("cpu"), slice(2), ONE.shape), 0, False),
        ([ONE, {"a": (TWO, nn.Parameter(ONE))}], 3, False),
        (Box(ONE), 1, False),
        (Pair(ONE, Color.RED), 1, False),
        (Opaque(ONE), 0, True),
        ([ONE, Box([TWO, Opaque(ONE)])], 2, True),
        (nn.Linear(1, 1), 0, True),
    ],
    ids=str,
)
def test_tensors_that_a_unit_is_given(value: Any, count: int, hides: bool) -> None:
    found: list[Tensor] = []
    assert collect_tensors([value], found) is hides
    assert len(found) == count


@pytest.mark.parametrize("tree", [ONE, None, (ONE, 3), [ONE], ([ONE], 3), {"a": (ONE, [2])}], ids=str)
def test_a_value_that_is_kept(tree: Any) -> None:
    again = kept(tree)
    assert str(again) == str(tree)
    assert [each is ONE for each in tensors_in(again)] == [True] * len(tensors_in(tree))
    assert (again is tree) == (tree is ONE or tree is None or tree == (ONE, 3))


def test_tensors_that_objects_hold() -> None:
    cyclic = Opaque({"a": {ONE}, "b": [TWO]})
    cyclic.inside["self"] = cyclic
    assert sorted(map(len, held_by((cyclic, nn.Linear)))) == [1, 2]


class Entry:
    def __init__(self) -> None:
        self.keys, self.values = torch.zeros(1), torch.zeros(1)


class Cache:
    def __init__(self, entries: int) -> None:
        self.entries = [Entry() for _ in range(entries)]
        self.owner = self


def test_all_tensors_of_objects_in_objects_are_found_once() -> None:
    cache = Cache(40)
    found = held_by(({"cache": cache}, [cache], Entry()))
    assert len(found) == len({id(tensor) for tensor in found}) == 82
