"""Nested Python values as JSON. Messages between processes and checkpoints use the same form.

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

from pipework.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

_MAPPINGS: Final = MappingProxyType({"dict": dict, "OrderedDict": OrderedDict})
_SPLIT_PAIR: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # JSON would join the two into one character
_MOST_BITS: Final = 14_000  # Python reads and writes up to 4300 decimal digits
TEXT_READERS: Final[Mapping[str, Callable[[str], Any]]] = MappingProxyType(
    {
        "int": lambda text: int(text, 16),
        "float": float,
        "str": lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    }
)


class JsonCodec:
    """Encodes and decodes what state dicts hold: None, numbers, strings, lists, tuples, sets, dicts and tensors.

    A subclass may have further kinds of nodes and leaves.

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

    def encode(self, value: Any, path: str = "") -> Any:
        """A value as what `json` can write.

        Args:
            value: what to encode.
            path: begins the names of tensors, and the paths in errors.

        Raises:
            TypeError: there is no form for a part of the value; the message has its path.
        """
        leaves, spec = pytree.tree_flatten(value, is_leaf=self.is_leaf)
        return self.encode_tree(spec, iter(leaves), path)

    def decode(self, form: Any) -> Any:
        """The value that was encoded.

        Raises:
            ValueError: the form is malformed.
        """
        leaves: list[Any] = []
        spec = self.decode_tree(form, leaves)
        return pytree.tree_unflatten(leaves, spec)

    def encode_tree(self, spec: pytree.TreeSpec, leaves: Iterator[Any], path: str) -> Any:
        """A value that PyTorch's pytree has flattened."""
        if spec.is_leaf():
            return self.encode_leaf(next(leaves), path)
        children = zip(self.steps(spec), spec.children(), strict=True)
        items = [self.encode_tree(child, leaves, path + step) for step, child in children]
        kind, keys = spec.type, spec.context
        if kind is list:
            return items
        if kind is tuple:
            return {"$": "tuple", "items": items}
        if kind is dict and all(type(key) is str and key != "$" and not _SPLIT_PAIR.search(key) for key in keys):
            return dict(zip(keys, items, strict=True))
        if kind is dict or kind is OrderedDict:
            return {"$": kind.__name__, "items": self.encode_pairs(keys, items, path)}
        return self.encode_node(spec, items, path)

    def decode_tree(self, form: Any, leaves: list[Any]) -> pytree.TreeSpec:
        """The nesting of a value, whose leaves are appended to a list."""
        kind: Any = None
        context: Any = None
        items: list[Any] = []
        match form:
            case list():
                kind, items = list, form
            case {"$": "tuple", "items": list(items)}:
                kind = tuple
            case {"$": "dict" | "OrderedDict" as name, "items": list(pairs)}:
                kind, (context, items) = _MAPPINGS[name], self.decode_pairs(pairs)
            case {"$": _}:
                kind, context, items = self.decode_node(form) or (None, None, [])
            case dict():
                kind, context, items = dict, list(form), list(form.values())
        if kind is not None:
            return pytree.TreeSpec(kind, context, [self.decode_tree(item, leaves) for item in items])
        leaves.append(self.decode_leaf(form) if isinstance(form, dict) else form)
        return pytree.tree_structure(None)

    def encode_pairs(self, keys: Sequence[Any], items: list[Any], path: str) -> list[list[Any]]:
        """The items of a dict, whose keys in JSON could only be text."""
        return [[self.encode_key(key, path), item] for key, item in zip(keys, items, strict=True)]

    def decode_pairs(self, pairs: list[Any]) -> tuple[list[Any], list[Any]]:
        """The keys of a dict, and the forms of its values."""
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError("the items of a dict must be pairs")
        keys = [self.decode_key(key) for key, _ in pairs]
        try:
            distinct = len(dict.fromkeys(keys))
        except TypeError as error:
            raise ValueError(f"a dict with an impossible key: {error}") from error
        if distinct != len(keys):
            raise ValueError("a dict with equal keys")
        return keys, [item for _, item in pairs]

    def encode_key(self, key: Any, path: str) -> Any:
        """The key of a dict."""
        return self.encode(key, path)

    def decode_key(self, form: Any) -> Any:
        """The key of a dict."""
        return self.decode(form)

    def is_leaf(self, value: Any) -> bool:
        """Whether `encode_leaf` is to have a value, also if PyTorch's pytree could flatten it."""
        return type(value) not in (list, tuple, dict, OrderedDict)

    def steps(self, spec: pytree.TreeSpec) -> list[str]:
        """The steps of a path from a node to each of its children."""
        return [f"/{key}" for key in (range(spec.num_children) if spec.context is None else spec.context)]

    def encode_node(self, spec: pytree.TreeSpec, items: list[Any], path: str) -> Any:
        """A node that is no list, tuple, dict or OrderedDict, with the forms of its children."""
        raise TypeError(f"{path} is a {spec.type}")

    def decode_node(self, form: Any) -> tuple[Any, Any, list[Any]] | None:
        """Type, context and the children's forms of such a node; None for the form of a leaf."""
        return None

    def encode_leaf(self, value: Any, path: str) -> Any:
        """A value without children."""
        kind = type(value)
        if isinstance(value, torch.Tensor) and self._put is not None:
            return {"$": "tensor", "name": self._put(path, value)}
        if kind is torch.Size:
            return self.encode(tuple(value), path)
        if kind in (set, frozenset):
            return {"$": "set", "items": self.encode(sorted(value, key=repr), path)}
        if kind is Counter:
            items = [self.encode(item, f"{path}/{key}") for key, item in value.items()]
            return {"$": "Counter", "items": self.encode_pairs(list(value), items, path)}
        if value is None or kind is bool:
            return encode_scalar(value)
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

    def decode_leaf(self, form: dict[str, Any]) -> Any:
        """A leaf that has a form of its own."""
        match form:
            case {"$": "tensor", "name": str(name)} if self._get is not None:
                return self._get(name)
            case {"$": "set", "items": list(items)}:
                return set(self.decode_pairs([[item, None] for item in items])[0])
            case {"$": "Counter", "items": list(pairs)}:
                keys, items = self.decode_pairs(pairs)
                return Counter(dict(zip(keys, self.decode(items), strict=True)))
        return decode_scalar(form)


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


def decode_scalar(form: Any, readers: Mapping[str, Callable[[str], Any]] = TEXT_READERS) -> Any:
    """A value whose form is its kind and a text.

    Raises:
        ValueError: no reader is for this kind.

    Example:
        >>> decode_scalar({"$": "float", "value": "nan"})
        nan
    """
    match form:
        case {"$": str(kind), "value": str(text)} if kind in readers:
            return readers[kind](text)
    raise ValueError(f"it holds a value of the unknown kind {str(form['$'])[:80]!r}")
