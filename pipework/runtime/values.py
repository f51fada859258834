"""A value that crosses a boundary, taken apart into its tensors and a recipe that puts it together again.

Layers exchange nested structures: tuples, lists, dicts, None, plain values. What travels between workers is a flat
tuple of tensors; what stays the same for every micro-batch is the structure around them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils import (
    _pytree as pytree,
)  # PyTorch's own nested-structure library: it also knows what users registered with it

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Tensor:
    """Marks the place of a tensor among the leaves (None is a plain value of its own)."""


class Structure(NamedTuple):
    """What remains of a value without its tensors: the nesting, and the leaves with a mark for each tensor."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]


def flatten(value: Any) -> tuple[tuple[Tensor, ...], Structure | None]:
    """Takes the tensors out of a value. The structure of a single tensor is None, the fast and common case.

    Tuples, named tuples, lists, dicts and dataclasses are taken apart, and what was registered with PyTorch's pytree
    (as transformers does with its `ModelOutput`); anything else is a plain value.

    Example:
        >>> import torch
        >>> tensors, structure = flatten((torch.zeros(2), 5))
        >>> len(tensors), unflatten(tensors, structure)[1]
        (1, 5)
    """
    if isinstance(value, Tensor):
        return (value,), None
    leaves, spec = pytree.tree_flatten(value)
    unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    if unknown:
        # PyTorch takes apart only those dataclasses that it has been told of.
        for kind in unknown:
            pytree.register_dataclass(kind)
        return flatten(value)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    return tensors, Structure(spec, tuple(_Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves))


def unflatten(tensors: tuple[Tensor, ...], structure: Structure | None) -> Any:
    """Puts a value together from tensors in the order in which `flatten` gave them."""
    if structure is None:
        return tensors[0]
    remaining = iter(tensors)
    leaves = [next(remaining) if leaf is _Tensor else leaf for leaf in structure.leaves]
    return pytree.tree_unflatten(leaves, structure.spec)


def leaves(value: Any, kinds: tuple[type, ...]) -> list[Any]:
    """The leaves of these types, in the order in which `flatten` meets them."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, kinds)]


def replaced(value: Any, kind: type, replacement: Callable[[Any], Any]) -> Any:
    """The value with every leaf of a type replaced."""
    return pytree.tree_map(lambda leaf: replacement(leaf) if isinstance(leaf, kind) else leaf, value)


def same_nesting(left: Structure | None, right: Structure | None) -> bool:
    """Whether two values have their tensors and plain values at the same places."""
    if left is None or right is None:
        return left is right
    return left.spec == right.spec and all(
        (a is _Tensor) == (b is _Tensor) for a, b in zip(left.leaves, right.leaves, strict=True)
    )


def collect(structures: Sequence[Structure | None]) -> Structure | None:
    """One structure for equally nested values: each plain value becomes the list of all of them.

    Example:
        >>> import torch
        >>> _, structure = flatten((torch.zeros(1), 5))
        >>> unflatten((torch.zeros(1),), collect([structure, structure]))
        (tensor([0.]), [5, 5])
    """
    first = structures[0]
    if first is None:
        return None
    columns = zip(*(structure.leaves for structure in structures if structure is not None), strict=True)
    return Structure(first.spec, tuple(_Tensor if column[0] is _Tensor else list(column) for column in columns))


def describe(structure: Structure | None) -> str:
    """The nesting in words for an error message, such as `(tensor, int)`."""
    if structure is None:
        return "tensor"
    leaves = ["tensor" if leaf is _Tensor else type(leaf).__name__ for leaf in structure.leaves]
    return str(pytree.tree_unflatten(leaves, structure.spec)).replace("'", "")
