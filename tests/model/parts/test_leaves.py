from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from pipework.model.parts.leaves import Absent, flatten, held_by, unflatten

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


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def test_tensors_that_objects_hold() -> None:
    cyclic = Opaque({"a": {ONE}, "b": [TWO], "c": [Opaque(TWO), Opaque(ONE)]})
    cyclic.inside["self"] = cyclic
    plain: dict[str, Any] = {"a": Slotted(deque([ONE]))}
    plain["self"] = [plain]
    assert sorted(map(len, held_by((cyclic, [cyclic], nn.Linear)))) == [1, 2]
    assert sorted(map(len, held_by(plain, TWO.add_))) == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_in_place_of_one_that_is_absent(dtype: torch.dtype) -> None:
    tensor = Absent.of(torch.ones(3, 5, dtype=dtype)).tensor(torch.device("cpu"))
    assert (tensor.shape, tensor.dtype) == ((3, 5), dtype)
    assert tensor.untyped_storage().nbytes() == dtype.itemsize
    assert tensor.isnan().all() == dtype.is_floating_point
