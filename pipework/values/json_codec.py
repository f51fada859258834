"""Nested Python values as JSON, as checkpoints have them.

None, booleans, integers, finite floats, text, lists, and dicts whose keys are text are written as JSON has them. Every
other value is an object with the key "$", which names its kind, such as `{"$": "tuple", "items": [1, 2]}`. Reading
imports nothing and runs nothing: an unknown kind is a ValueError.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_MAPPINGS: Final = MappingProxyType({kind.__name__: kind for kind in (dict, OrderedDict, Counter)})
_SPLIT_PAIR: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # JSON would join the two into one character
_MOST_BITS: Final = 14_000  # Python reads and writes up to 4300 decimal digits


class JsonCodec:
    """Encodes and decodes what state dicts hold: None, numbers, strings, lists, tuples, sets, dicts and tensors.

    Args:
        put: stores a tensor under a name, and returns the name that it has taken.
        get: reads a tensor by its name.

    Example:
        >>> tensors = {}
        >>> def put(name, tensor):
        ...     tensors[name] = tensor
        ...     return name
        >>> form = JsonCodec(put=put).encode({"betas": (0.9, math.inf), "exp_avg": torch.zeros(2)}, "0.weight")
        >>> form["betas"], list(tensors)
        ({'$': 'tuple', 'items': [0.9, {'$': 'float', 'value': 'inf'}]}, ['0.weight/exp_avg'])
        >>> JsonCodec(get=tensors.__getitem__).decode(form)
        {'betas': (0.9, inf), 'exp_avg': tensor([0., 0.])}
    """

    def __init__(
        self, put: Callable[[str, Tensor], str] | None = None, get: Callable[[str], Tensor] | None = None
    ) -> None:
        self._put = put
        self._get = get

    def encode(self, value: Any, path: str) -> Any:
        """A value as what `json` can write.

        Args:
            value: what to encode.
            path: begins the names of tensors, and the paths in errors.

        Raises:
            TypeError: there is no form for a part of the value; the message has its path.
        """
        kind = type(value)
        if isinstance(value, torch.Tensor) and self._put is not None:
            return {"$": "tensor", "name": self._put(path, value)}
        if kind in (list, tuple, torch.Size):
            items = [self.encode(item, f"{path}/{index}") for index, item in enumerate(value)]
            return items if kind is list else {"$": "tuple", "items": items}
        if kind in (set, frozenset):
            return {"$": "set", "items": self.encode(sorted(value, key=repr), path)}
        if kind in _MAPPINGS.values():
            items = [self.encode(item, f"{path}/{key}") for key, item in value.items()]
            if kind is dict and all(type(key) is str and key != "$" and not _SPLIT_PAIR.search(key) for key in value):
                return dict(zip(value, items, strict=True))
            keys = [self.encode(key, path) for key in value]
            return {"$": kind.__name__, "items": [list(pair) for pair in zip(keys, items, strict=True)]}
        if value is None or kind is bool:
            return value
        # Numbers of numpy and members of an IntEnum or a StrEnum become Python's own.
        if isinstance(value, str):
            return encode_scalar(str.__str__(value))
        if isinstance(value, Integral):
            return encode_scalar(int(value))
        if isinstance(value, Real):
            return encode_scalar(float(value))
        raise TypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: wanted None, numbers, "
            "strings, tensors, and lists, tuples, sets and dicts of them. Nothing was written"
        )

    def decode(self, form: Any) -> Any:
        """The value that was encoded.

        Raises:
            ValueError: the form is of an unknown kind.
            Exception: the form is malformed in another way.
        """
        match form:
            case list():
                return list(map(self.decode, form))
            case {"$": "tuple", "items": list(items)}:
                return tuple(map(self.decode, items))
            case {"$": "set", "items": list(items)}:
                return set(map(self.decode, items))
            case {"$": str(kind), "items": list(pairs)} if kind in _MAPPINGS:
                return _MAPPINGS[kind]({self.decode(key): self.decode(item) for key, item in pairs})
            case {"$": "tensor", "name": str(name)} if self._get is not None:
                return self._get(name)
            case {"$": _}:
                return decode_scalar(form)
            case dict():
                return {key: self.decode(item) for key, item in form.items()}
        return form


def encode_scalar(value: Any) -> Any:
    """None, a bool, an int, a float or a str, exactly.

    Example:
        >>> encode_scalar(0.1), encode_scalar(math.nan)
        (0.1, {'$': 'float', 'value': 'nan'})
    """
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return {"$": "int", "value": hex(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$": "float", "value": repr(value)}
    if isinstance(value, str) and _SPLIT_PAIR.search(value):
        return {"$": "str", "value": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def decode_scalar(form: Any) -> Any:
    """A value whose form is its kind and a text.

    Raises:
        ValueError: there is no such kind.

    Example:
        >>> decode_scalar({"$": "float", "value": "nan"})
        nan
    """
    match form:
        case {"$": "int", "value": str(text)}:
            return int(text, 16)
        case {"$": "float", "value": str(text)}:
            return float(text)
        case {"$": "str", "value": str(text)}:
            return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
    raise ValueError(f"it holds a value of the unknown kind {str(form['$'])[:80]!r}")
