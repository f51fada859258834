"""The values among the arguments of a call, by their names, and what their sizes say of rows."""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from pipework.model.marks import WHOLE, Chunk, NoChunk, is_dense
from pipework.torch_private import pytree
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN: Final = (
    type(None), bool, int, float, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device, torch.Generator,
    FunctionType, BuiltinFunctionType,
)  # fmt: skip


_DEPTH: Final = 3  # of objects in objects


class Value(NamedTuple):
    """A value among the arguments: a tensor, a list or tuple, or what has no parts.

    Attributes:
        name: such as ``images[0]``.
        value: without a mark.
        mark: the dimension of `Chunk`, `WHOLE` in `NoChunk`; None: there is no mark around it.
    """

    name: str
    value: Any
    mark: int | None


def values_in(name: str, value: Any, wrapper: Chunk | NoChunk | None = None) -> Iterator[Value]:
    """A value and, if it is a container, what it contains, at any depth.

    Args:
        name: of the value.
        value: perhaps with a mark.
        wrapper: the mark around it, if there is one.

    Example:
        >>> [each.name for each in values_in("batch", {"ids": torch.ones(2), "more": [1, None]})]
        ["batch['ids']", "batch['more']", "batch['more'][0]", "batch['more'][1]"]
    """
    while isinstance(value, NoChunk | Chunk):
        value, wrapper = value.value, value
    parts = _parts(value)
    if parts is None or is_list(value):
        mark = None if wrapper is None else WHOLE
        if isinstance(wrapper, Chunk):
            mark = wrapper.dim % max(value.dim(), 1) if isinstance(value, Tensor) else 0
        yield Value(name, value, mark)
    for place, part in parts or ():
        yield from values_in(name + place, part, wrapper)


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """What a container contains, and where; None: it is none that `nested.flatten` opens."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{field}", part) for field, part in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if isinstance(value, Tensor):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field}", part) for field, part in nested.fields_of(value).items()]
    parts, _ = pytree.tree_flatten(value, is_leaf=lambda each: each is not value)
    return None if len(parts) == 1 and parts[0] is value else [(f"[{n}]", part) for n, part in enumerate(parts)]


def places_of(value: Any, rows: int) -> list[int]:
    """The dimensions of a tensor that have this size."""
    return [dim for dim, size in enumerate(value.shape) if size == rows] if isinstance(value, Tensor) else []


def may_be_offsets(tensor: Tensor) -> bool:
    """Whether a tensor may say where sequences begin: 0, and then numbers that grow, by other steps than 1."""
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or len(tensor) < 2:
        return False
    steps = tensor.long().diff()
    return bool((tensor[0] == 0) & (steps >= 0).all() & (steps > 1).any())


def has_entries(value: Any, rows: int) -> bool:
    """Whether what is no tensor has an entry for each row, or holds something that has, at some depth."""
    if isinstance(value, (Tensor, *PLAIN)):
        return False
    if is_list(value):
        return len(value) == rows
    return _entries(value) == rows or hasattr(value, "__next__") or _holds_entries(value, rows, _DEPTH)


def is_list(value: Any) -> bool:
    """Whether a value is a container whose parts have no names: a dict with numbers as keys is one, too."""
    if isinstance(value, dict):
        return bool(value) and not any(isinstance(key, str) for key in value)
    return isinstance(value, list | tuple | deque) and not hasattr(value, "_fields")


def _holds_entries(value: Any, rows: int, depth: int) -> bool:
    """Whether an object holds a tensor with so many rows in any dimension, or another value with as many entries."""
    held = [*getattr(value, "__dict__", {}).values()]
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held += [getattr(value, name) for name in names if hasattr(value, name)]
    for each in held if depth else ():
        for leaf in pytree.tree_leaves(each, is_leaf=lambda part: is_list(part) and len(part) == rows):
            if isinstance(leaf, Tensor):
                if is_dense(leaf) and rows in leaf.shape:
                    return True
            elif not isinstance(leaf, PLAIN) and (_entries(leaf) == rows or _holds_entries(leaf, rows, depth - 1)):
                return True
    return False


def _entries(value: Any) -> int | None:
    """How many entries an object says that it has."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape and isinstance(shape[0], int):
        return shape[0]
    try:
        return len(value)
    except TypeError:
        return None


def holds_tensors(value: Any) -> bool:
    """Whether a value is a container of tensors, which are cut."""
    return is_list(value) and any(isinstance(each, Tensor) for each in pytree.tree_leaves(value))


def described(name: str, value: Any) -> str:
    """What a value is, for messages."""
    if isinstance(value, Tensor):
        return f"{name!r} has the shape {tuple(value.shape)}"
    entries = _entries(value)
    held = "values inside" if entries is None else f"{entries} entr{'y' if entries == 1 else 'ies'}"
    return f"{name!r} is a {type(value).__name__} with {held}"


def refuse_uncut(name: str, tensor: Tensor) -> None:
    """Raises a ValueError for a tensor that has no rows to cut."""
    if not is_dense(tensor):
        raise not_dense(repr(name), tensor)
    if not tensor.dim():
        raise ValueError(
            f"{name!r} is 0-dimensional and cannot be split into micro-batches: give it a dimension of the batch's "
            "rows, or wrap it in NoChunk, so that every micro-batch gets it as it is"
        )


def not_dense(what: str, tensor: Tensor) -> ValueError:
    """The error of a tensor that has no rows which can be cut off."""
    kind = "a nested tensor" if tensor.is_nested else f"not dense (layout {tensor.layout})"
    return ValueError(
        f"{what} is {kind}, and only dense tensors are split into micro-batches: make it dense, wrap it in NoChunk if "
        "every micro-batch should get it whole, or split the mini-batch yourself and give its parts in MicroBatches"
    )
