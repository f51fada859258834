from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from pipework import Chunk, NoChunk
from pipework.model.call_values import has_entries, may_be_offsets, values_in
from pipework.model.marks import WHOLE

Pair = namedtuple("Pair", ["left", "right"])
X = torch.ones(4, 2)


@dataclass
class Batch:
    ids: Tensor
    name: str = "text"


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Holding:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (X, ["x"]),
        (None, ["x"]),
        ([X, 5], ["x", "x[0]", "x[1]"]),
        ({"a": X, 3: (X,)}, ["x['a']", "x[3]", "x[3][0]"]),
        (OrderedDict(a=X), ["x['a']"]),
        (Pair(X, 1), ["x.left", "x.right"]),
        ({0: X, 1: X}, ["x", "x[0]", "x[1]"]),
        (deque([X]), ["x", "x[0]"]),
        (Batch(X), ["x.ids", "x.name"]),
        (NoChunk([X]), ["x", "x[0]"]),
        (torch.Size([2, 3]), ["x", "x[0]", "x[1]"]),
    ],
)
def test_names(value: Any, names: list[str]) -> None:
    assert [each.name for each in values_in("x", value)] == names


def test_marks_are_those_of_all_that_is_inside() -> None:
    def marks(value: Any) -> list[int | None]:
        return [each.mark for each in values_in("x", value)]

    assert marks([X, NoChunk({"a": X}), Chunk((X,), dim=-1)]) == [None, None, WHOLE, 0, 1]
    assert marks(NoChunk("text")) == [WHOLE]


@pytest.mark.parametrize(
    "value",
    [
        ["a"] * 4,
        (1, 2, 3, 4),
        numpy.zeros((4, 2)),
        Holding(torch.zeros(4, 3)),
        Holding({"mask": [torch.zeros(4)]}),
        UserDict(ids=torch.zeros(4, 3)),
        range(4),
        {1, 2, 3, 4},
        deque("abcd"),
        dict(enumerate("abcd")),
        Slots(torch.zeros(4)),
        Holding(Holding(torch.zeros(2, 4))),
        Holding({"names": ["a", "b", "c", "d"]}),
        iter(["a"]),
    ],
)
def test_values_with_an_entry_for_each_of_four_rows(value: Any) -> None:
    assert has_entries(value, 4)
    assert not has_entries(value, 5) or hasattr(value, "__next__")  # which can be read once only


@pytest.mark.parametrize("value", ["text", b"text", None, 4, X, torch.float32, len, Holding(4), numpy.float32(4), list])
def test_values_without(value: Any) -> None:
    assert not has_entries(value, 4)


@pytest.mark.parametrize(
    ("values", "may"),
    [
        ([0, 8, 10, 20], True),
        ([0, 3, 3], True),
        ([0, 1, 2, 3], False),  # the numbers of rows
        ([0, 0, 1, 1], False),
        ([1, 8, 10], False),
        ([0, 8, 4], False),
        ([0], False),
        ([0.0, 8.0, 10.0], False),
        ([[0, 8], [10, 20]], False),
    ],
)
def test_offsets(values: list[Any], may: bool) -> None:
    assert may_be_offsets(torch.tensor(values)) is may
