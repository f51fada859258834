"""The leaves of nested values, as messages take them apart: also dataclasses are opened, as between stages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HAVE_NAN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Absent:
    """The form of a tensor that no later part reads: a message holds it in place of the values, as the glue runs on.

    Attributes:
        shape: of the tensor.
        dtype: its name, such as "float32".
    """

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The form of a tensor.

        Example:
            >>> Absent.of(torch.ones(2, 3))
            Absent(shape=(2, 3), dtype='float32')
        """
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def tensor(self, device: torch.device) -> Tensor:
        """A tensor of this form that takes the memory of one element.

        It is NaN where there is one, so that a part that reads it although it should not does not go unnoticed.
        """
        dtype = getattr(torch, self.dtype)
        return torch.full((), math.nan if dtype in _HAVE_NAN else 0, dtype=dtype, device=device).expand(self.shape)


_PLAIN = (bool, int, float, complex, str, bytes, type, FunctionType, ModuleType, Absent)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a nested value, and what `unflatten` makes such a value of.

    Example:
        >>> leaves, form = flatten({"a": (1, 2)})
        >>> leaves, unflatten([3, 4], form)
        ([1, 2], {'a': (3, 4)})
    """
    return nested.leaves_of(tree, (Tensor, Absent))


def unflatten(leaves: Iterable[Any], form: Any) -> Any:
    """See `flatten`."""
    return torch_private.pytree.tree_unflatten(leaves, form)


def mapped(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """The nested value with every leaf of a type replaced."""
    leaves, form = flatten(tree)
    return unflatten([function(leaf) if isinstance(leaf, kind) else leaf for leaf in leaves], form)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a nested value."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def held_by(*trees: Any) -> list[Tensor]:
    """The tensors of nested values, and those that objects in it hold, which nothing between stages would find.

    Example:
        >>> import torch
        >>> class Context:
        ...     def __init__(self):
        ...         self.masks = [torch.zeros(3)]
        >>> tensors_in(Context()), held_by(Context())
        ([], [tensor([0., 0., 0.])])
    """
    seen: dict[int, Any] = {}
    return [each for tree in trees for each in reached(tree, seen) if isinstance(each, Tensor)]


def reached(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """A value and all that it holds, at any depth; modules and plain values hold nothing.

    Args:
        value: any.
        seen: what has been reached before, by id, and is left out.
    """
    if id(value) in seen or value is None or isinstance(value, _PLAIN):
        return
    seen[id(value)] = value  # kept, so that nothing else gets its id
    yield value
    if isinstance(value, Tensor | nn.Module):
        return
    inside = [*nested.attributes_of(value).values(), getattr(value, "__self__", None)]
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inside += value
    for each in inside:
        yield from reached(each, seen)
