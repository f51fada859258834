"""Structures as JSON, for messages between processes: the nesting of a value with its leaves, and numbers for tensors.

A form comes from a peer, which may be broken or hostile. A name stands for a class that is imported already. Building a
value calls no function but those that this process itself registered with PyTorch's pytree.
"""

from __future__ import annotations

import base64
import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from enum import Enum, Flag
from types import EllipsisType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

from pipework.torch_private import pytree
from pipework.values import classes
from pipework.values.json_codec import TEXT_READERS, JsonCodec, decode_scalar, encode_scalar
from pipework.values.nested import DataclassNode, Place, Structure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DTYPES: Final = MappingProxyType(
    {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
)
SUPPORTED: Final = (
    "None, bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, slice, range, ... and members "
    "of enums"
)
KEY_TYPES: Final = (bool, int, float, complex, str, bytes, EllipsisType, torch.Size, torch.dtype, torch.device)
_BUILTIN: Final = (tuple, list, dict, OrderedDict, defaultdict, deque, DataclassNode)
_FACTORIES: Final = MappingProxyType({kind.__name__: kind for kind in (list, dict, int, float, set, str)})
_TEXT_WRITERS: Final[Mapping[type, Callable[[Any], str]]] = MappingProxyType(
    {
        complex: lambda value: f"{value.real!r} {value.imag!r}",
        bytes: lambda value: base64.b64encode(value).decode(),
        torch.dtype: str,
        torch.device: str,
    }
)
_TEXT_READERS: Final = MappingProxyType(
    {
        **TEXT_READERS,
        "complex": lambda text: _complex(*text.split()),
        "bytes": lambda text: base64.b64decode(text, validate=True),
        "dtype": DTYPES.__getitem__,
        "device": torch.device,
    }
)


class EncodeError(TypeError):
    """A value that another process could not build.

    Attributes:
        value: a description of the value.
        path: its position, such as `[0]['mask'].hidden`.
    """

    def __init__(self, value: str, path: str) -> None:
        super().__init__(f"{value} stands at {path or 'the top'}")
        self.value = value
        self.path = path


def encode(structure: Structure) -> Any:
    """A structure as what `json` can write.

    Raises:
        EncodeError: another process could not build a leaf or a node.

    Example:
        >>> encode(Structure(pytree.tree_structure({"a": 1, "b": (2,)}), (Place(0), "two")))
        {'a': {'$': 'tensor', 'name': 0}, 'b': {'$': 'tuple', 'items': ['two']}}
    """
    return _StructureCodec().encode_tree(structure.spec, iter(structure.leaves), "")


def decode(form: Any, count: int) -> Structure:
    """The structure of what `encode` gave.

    Raises:
        ValueError: the form is malformed, or names a class that this process does not know.

    Example:
        >>> decode([{"$": "tensor", "name": 0}, "two"], 1).leaves
        (Place(position=0), 'two')
    """
    leaves: list[Any] = []
    spec = _StructureCodec(count).decode_tree(form, leaves)
    return Structure(spec, tuple(leaves))


class _StructureCodec(JsonCodec):
    """Adds PyTorch's other nodes, registered classes, dataclasses, enums and tensors by number.

    Args:
        count: how many tensors a form may name.
    """

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self._count = count
        self._plain = _StructureCodec() if count else self  # for values without tensors

    def is_leaf(self, value: Any) -> bool:
        return type(value) is torch.Size  # pytree would give it back as a tuple

    def steps(self, spec: pytree.TreeSpec) -> list[str]:
        kind, context = spec.type, spec.context
        if kind is dict or kind is OrderedDict:
            return [f"[{key!r}]" for key in context]
        if kind is defaultdict:
            return [f"[{key!r}]" for key in context[1]]
        if kind is namedtuple:
            return [f".{name}" for name in context._fields]
        if kind is DataclassNode:
            return [f".{name}" for name in context[1]]
        return [f"[{index}]" for index in range(spec.num_children)]

    def encode_key(self, key: Any, path: str) -> Any:
        if not _is_key(key):
            raise EncodeError(f"a key of type {type(key).__module__}.{type(key).__qualname__}", path)
        return self._plain.encode(key, path)

    def decode_key(self, form: Any) -> Any:
        key = self._plain.decode(form)
        if not _is_key(key):
            raise ValueError(f"a value of type {type(key).__qualname__} is no key of a dict")
        return key

    def encode_node(self, spec: pytree.TreeSpec, items: list[Any], path: str) -> Any:
        kind, context = spec.type, spec.context
        if kind is defaultdict:
            factory = _factory_name(context[0], path)
            return {"$": "defaultdict", "class": factory, "items": self.encode_pairs(context[1], items, path)}
        if kind is deque:
            return {"$": "deque", "maxlen": context, "items": items}
        if kind is namedtuple:
            return {"$": "namedtuple", "class": _class_name(context, path), "items": items}
        if kind is DataclassNode:
            fields = dict(zip(context[1], items, strict=True))
            return {"$": "fields", "class": _class_name(context[0], path), "fields": fields}
        try:
            about = self._plain.encode(context)
        except EncodeError as error:
            known = f"what {kind.__module__}.{kind.__qualname__} was registered with PyTorch's pytree to remember"
            raise EncodeError(f"{error.value}, in {known},", path) from None
        return {"$": "class", "class": _class_name(kind, path), "context": about, "items": items}

    def decode_node(self, form: Any) -> tuple[Any, Any, list[Any]] | None:
        match form:
            case {"$": "defaultdict", "class": factory, "items": list(pairs)}:
                keys, items = self.decode_pairs(pairs)
                return defaultdict, [None if factory is None else _FACTORIES[factory], keys], items
            case {"$": "deque", "maxlen": None | int() as most, "items": list(items)}:
                if most is not None and not len(items) <= most < 2**31:
                    raise ValueError(f"a deque of at most {most} items arrives with {len(items)}")
                return deque, most, items
            case {"$": "namedtuple", "class": name, "items": list(items)}:
                return namedtuple, _named_tuple(name, len(items)), items
            case {"$": "fields", "class": name, "fields": dict(fields)}:
                return DataclassNode, (_dataclass(name, fields), tuple(fields)), list(fields.values())
            case {"$": "class", "class": name, "context": context, "items": list(items)}:
                return _registered(name), self._plain.decode(context), items
        return None

    def encode_leaf(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is Place:
            return {"$": "tensor", "name": value.position}
        if value is None or kind in (bool, int, float, str):
            return encode_scalar(value)
        if kind in _TEXT_WRITERS:
            return {"$": kind.__name__, "value": _TEXT_WRITERS[kind](value)}
        if kind is torch.Size:
            return {"$": "Size", "items": list(value)}
        if kind is slice or kind is range:
            return {"$": kind.__name__, "items": self._plain.encode([value.start, value.stop, value.step], path)}
        if value is Ellipsis:
            return {"$": "Ellipsis"}
        if isinstance(value, Enum):
            return {"$": "enum", "class": _class_name(kind, path), "names": _member_names(value, path)}
        if not dataclasses.is_dataclass(kind):
            raise EncodeError(f"a value of type {kind.__module__}.{kind.__qualname__}", path)
        try:
            _check_instantiable(kind)
        except ValueError as error:
            raise EncodeError(f"a value of type {kind.__module__}.{kind.__qualname__} ({error})", path) from None
        # A dataclass without tensors is a leaf. It has the form of a node with its fields.
        return {**self._plain.encode(DataclassNode.of(value), path), "$": "dataclass"}

    def decode_leaf(self, form: dict[str, Any]) -> Any:
        match form:
            case {"$": "tensor", "name": int(position)} if not isinstance(position, bool):
                if not 0 <= position < self._count:
                    raise ValueError(f"tensor {position} of {self._count} is asked for")
                return Place(position)
            case {"$": "dataclass", **rest}:
                return self._plain.decode({**rest, "$": "fields"})
            case {"$": "Size", "items": list(sizes)}:
                return torch.Size(sizes)
            case {"$": "slice", "items": [_, _, _] as items}:
                return slice(*self._plain.decode(items))
            case {"$": "range", "items": [_, _, _] as items}:
                return range(*self._plain.decode(items))
            case {"$": "Ellipsis"}:
                return ...
            case {"$": "enum", "class": name, "names": list(names)}:
                kind = classes.named(name)
                if not issubclass(kind, Enum) or (len(names) != 1 and not issubclass(kind, Flag)):
                    raise ValueError(f"{kind.__module__}.{kind.__qualname__} is no enum with such members")
                return _member(kind, names)
        return decode_scalar(form, _TEXT_READERS)


def _complex(real: str, imaginary: str) -> complex:
    return complex(float(real), float(imaginary))


def _is_key(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_key, value))
    return value is None or type(value) in KEY_TYPES or isinstance(value, Enum)


def _class_name(kind: type, path: str) -> str:
    try:
        return classes.name(kind)
    except TypeError as error:
        raise EncodeError(str(error), path) from None


def _factory_name(factory: Any, path: str) -> str | None:
    if factory is None:
        return None
    if factory not in _FACTORIES.values():
        names = ", ".join(_FACTORIES)
        raise EncodeError(f"a defaultdict that makes its values with {factory!r}, not {names} or None,", path)
    return str(factory.__name__)


def _member_names(value: Enum, path: str) -> list[str]:
    kind = type(value)
    members = [value] if value.name in kind.__members__ else [*value] if isinstance(value, Flag) else []
    names = [str(member.name) for member in members]
    if _member(kind, names) is not value:
        raise EncodeError(f"a value of type {kind.__module__}.{kind.__qualname__} that is no member of it", path)
    return names


def _member(kind: type[Enum], names: list[str]) -> Any:
    """The member of that name, or the flag with those bits."""
    if len(names) == 1:
        return kind.__members__[names[0]]
    joined: Any = kind(0)
    for name in names:
        joined |= kind.__members__[name]
    return joined


def _named_tuple(name: Any, count: int) -> type:
    kind = classes.named(name)
    if not pytree.is_namedtuple_class(kind) or len(kind._fields) != count:  # type: ignore[attr-defined]
        raise ValueError(f"{name!r} is no named tuple of {count} fields in this process")
    return kind


def _dataclass(name: Any, fields: dict[str, Any]) -> type:
    kind = classes.named(name)
    _check_instantiable(kind)
    if not {field.name for field in dataclasses.fields(kind)}.issuperset(fields):
        raise ValueError(f"{name!r} has other fields in this process than {str([*fields])[:80]}")
    return kind


def _check_instantiable(kind: type) -> None:
    """Raises a ValueError unless an instance can be made from its fields alone: the class may also be a list."""
    if not dataclasses.is_dataclass(kind):
        raise ValueError(f"{kind.__module__}.{kind.__qualname__} is no dataclass")
    try:
        object.__new__(kind)  # runs no __init__
    except TypeError as error:
        raise ValueError(str(error)) from None


def _registered(name: Any) -> type:
    """A class whose unflatten function this process registered. The kinds with a form of their own are none of them."""
    kind = classes.named(name)
    if kind not in pytree.SUPPORTED_NODES or kind in _BUILTIN:
        raise ValueError(
            f"{name!r} is not registered with PyTorch's pytree in this process: register it in every process, before "
            "the first step"
        )
    return kind
