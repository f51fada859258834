"""Nested Python values as JSON and tensors, and back: what a scheduler, a scaler or an optimizer remembers.

Nothing that is read is ever run: there are these few types and no others. JSON has neither tuples nor keys that are
numbers nor infinities, so these are written as an object with the key "$", which says what it stands for.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

from pipework.saving.tensor_files import check_savable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

_MAPPINGS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
)


def pack(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON of a value; its tensors are put aside, under names that say where they were.

    Args:
        value: made of None, numbers, strings, lists, tuples, sets, dicts and tensors.
        where: how errors and names of tensors begin.
        tensors: where the tensors are put.

    Raises:
        TypeError: something else is in it.

    Example:
        >>> aside = {}
        >>> pack({"betas": (0.9, math.inf), "exp_avg": torch.zeros(2)}, "0.weight", aside)["betas"]
        {'$': 'tuple', 'items': [0.9, {'$': 'float', 'value': 'inf'}]}
        >>> list(aside)
        ['0.weight/exp_avg']
    """
    match value:
        case None | bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            number = float(value)
            return number if math.isfinite(number) else {"$": "float", "value": repr(number)}
        case torch.Tensor():
            name = where
            while name in tensors:  # "/" may be in any name
                name += "'"
            check_savable(name, value)
            tensors[name] = value
            return {"$": "tensor", "name": name}
    kind = type(value)
    if kind in (list, tuple, torch.Size, set, frozenset):
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        packed = [pack(item, f"{where}/{index}", tensors) for index, item in enumerate(items)]
        return packed if kind is list else {"$": "set" if kind in (set, frozenset) else "tuple", "items": packed}
    if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
        if kind is dict and all(type(key) is str for key in value) and "$" not in value:
            return {key: pack(item, f"{where}/{key}", tensors) for key, item in value.items()}
        pairs = [
            [pack(key, f"{where}/{key}", tensors), pack(item, f"{where}/{key}", tensors)] for key, item in value.items()
        ]
        return {"$": kind.__name__, "items": pairs}
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: wanted None, numbers, "
        "strings, tensors, and lists, tuples, sets and dicts of them. Nothing was written"
    )


def unpack(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What was packed.

    Args:
        value: JSON that `pack` made.
        tensor: from the name of a tensor to it.

    Raises:
        ValueError: it is something else.

    Example:
        >>> unpack(pack({1: (2.5, None)}, "", {}), {}.__getitem__)
        {1: (2.5, None)}
    """
    if isinstance(value, list):
        return [unpack(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$": "float", "value": "inf" | "-inf" | "nan" as text}:
            return float(text)
        case {"$": "tensor", "name": str(name)}:
            return tensor(name)
        case {"$": "tuple", "items": list(items)}:
            return tuple(unpack(item, tensor) for item in items)
        case {"$": "set", "items": list(items)}:
            return {unpack(item, tensor) for item in items}
        case {"$": str(kind), "items": list(items)} if kind in _MAPPINGS:
            return _MAPPINGS[kind]({unpack(key, tensor): unpack(item, tensor) for key, item in items})
        case {"$": unknown}:
            raise ValueError(f"it holds a value of the unknown kind {unknown!r}")
    return {key: unpack(item, tensor) for key, item in value.items()}
