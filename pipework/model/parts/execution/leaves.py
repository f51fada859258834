"""The leaves of nested values, as messages take them apart: also dataclasses are opened, as between stages."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.model.parts.execution.absent import Absent
from pipework.values.nested import DataclassNode, fields_of

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAIN = (bool, int, float, complex, str, bytes, type, FunctionType, ModuleType, nn.Module, Tensor, Absent)
_WITHOUT_TENSORS = frozenset(
    [type(None), bool, int, float, complex, str, bytes, slice, range, torch.dtype, torch.device, torch.Size]
)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a nested value, and what `unflatten` makes such a value of.

    Example:
        >>> leaves, form = flatten({"a": (1, 2)})
        >>> leaves, unflatten([3, 4], form)
        ([1, 2], {'a': (3, 4)})
    """
    leaves, spec = torch_private.pytree.tree_flatten(tree)
    if not any(_is_open(leaf) for leaf in leaves):
        return leaves, spec
    opened = [DataclassNode.of(leaf) if _is_open(leaf) else leaf for leaf in leaves]
    return flatten(torch_private.pytree.tree_unflatten(opened, spec))


def unflatten(leaves: Iterable[Any], form: Any) -> Any:
    """See `flatten`."""
    return torch_private.pytree.tree_unflatten(leaves, form)


def mapped(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """The nested value with every leaf of a type replaced."""
    if isinstance(tree, kind):  # the usual case
        return function(tree)
    leaves, form = flatten(tree)
    return unflatten([function(leaf) if isinstance(leaf, kind) else leaf for leaf in leaves], form)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a nested value."""
    if tree is None or isinstance(tree, Tensor):  # the usual cases
        return [] if tree is None else [tree]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def is_plain(value: Any) -> bool:
    """Whether a value is certainly a leaf that holds no tensor."""
    return type(value) in _WITHOUT_TENSORS


def kept(tree: Any) -> Any:
    """A nested value that stays what it is when its lists and dicts are changed; tensors are not copied."""
    if isinstance(tree, Tensor) or is_plain(tree):
        return tree
    if type(tree) is tuple and all(isinstance(each, Tensor) or is_plain(each) for each in tree):  # the usual cases
        return tree
    return unflatten(*flatten(tree))


def collect_tensors(values: Iterable[Any], found: list[Tensor]) -> bool:
    """Appends the tensors of nested values to a list; returns whether other objects in them may hold more.

    Example:
        >>> found = []
        >>> collect_tensors([torch.zeros(1), (3, {"a": torch.ones(1)})], found), collect_tensors([object()], found)
        (False, True)
        >>> found
        [tensor([0.]), tensor([1.])]
    """
    hides = False
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            found.append(value)
        elif kind in _WITHOUT_TENSORS:
            pass
        elif kind is tuple or kind is list:
            hides |= collect_tensors(value, found)
        elif kind is dict:
            hides |= collect_tensors(value.values(), found)
        else:
            leaves = flatten(value)[0]
            found += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            hides |= not all(isinstance(leaf, Tensor | enum.Enum) or is_plain(leaf) for leaf in leaves)
    return hides


def held_by(tree: Any) -> list[Tensor]:
    """The tensors of a nested value, and those that objects in it hold, which nothing between stages would find.

    Example:
        >>> import torch
        >>> class Context:
        ...     def __init__(self):
        ...         self.masks = [torch.zeros(3)]
        >>> tensors_in(Context()), held_by(Context())
        ([], [tensor([0., 0., 0.])])
    """
    found: list[Tensor] = []
    _collect(tree, found, {})
    return found


def _collect(value: Any, found: list[Tensor], seen: dict[int, Any]) -> None:
    for leaf in flatten(value)[0]:
        is_tensor = isinstance(leaf, Tensor)
        if id(leaf) in seen or leaf is None or (isinstance(leaf, _PLAIN) and not is_tensor):
            continue
        seen[id(leaf)] = leaf  # kept, so that nothing else gets its id
        if is_tensor:
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            _collect(list(leaf.values()), found, seen)
        elif isinstance(leaf, set | frozenset):
            _collect(list(leaf), found, seen)
        else:
            _collect(list(getattr(leaf, "__dict__", {}).values()), found, seen)


def _is_open(leaf: Any) -> bool:
    """Whether a leaf is a dataclass that holds tensors, or what stands in place of them."""
    if isinstance(leaf, type | Absent) or not dataclasses.is_dataclass(leaf):
        return False
    inside = torch_private.pytree.tree_leaves(list(fields_of(leaf).values()))
    return any(isinstance(each, Tensor | Absent) or _is_open(each) for each in inside)
