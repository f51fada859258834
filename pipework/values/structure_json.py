"""Structures as JSON, for messages between processes: the nesting of a value, and its leaves with numbers for tensors.

None, booleans, integers, finite floats and most text stand as they are, and a list is a JSON list. All else is an
object whose key "$" names its kind, and whose "items" are further forms:

    (tensor, {"mask": None})      {"$": "builtins:tuple", "context": null, "items": [
                                      {"$": "Place", "items": [0]},
                                      {"$": "builtins:dict", "context": ["mask"], "items": [null]}]}

A form comes from another process, which may be broken. A class is named by its module, which must be imported already.
Reading calls no functions but those that this process itself registered with PyTorch's pytree.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import sys
from collections import OrderedDict, namedtuple
from enum import Enum
from types import EllipsisType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

from pipework.torch_private import pytree
from pipework.values.json_codec import decode_scalar, encode_scalar
from pipework.values.nested import DataclassNode, Place, Structure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

DTYPES: Final = MappingProxyType(
    {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
)


def _ends(value: Any) -> list[Any]:
    return [value.start, value.stop, value.step]


# For each class of leaves: the plain values that make one up, and the function that makes it of them.
_LEAVES: Final[Mapping[type, tuple[Callable[[Any], list[Any]], Callable[..., Any]]]] = MappingProxyType(
    {
        Place: (list, Place),
        complex: (lambda value: [value.real, value.imag], complex),
        bytes: (lambda value: [base64.b64encode(value).decode()], base64.b64decode),
        torch.dtype: (lambda value: [str(value)], lambda name: DTYPES[name]),
        torch.device: (lambda value: [str(value)], torch.device),
        torch.Size: (list, lambda *sizes: torch.Size(sizes)),
        slice: (_ends, slice),
        range: (_ends, range),
        EllipsisType: (lambda value: [], lambda: ...),
        Enum: (lambda value: [class_name(type(value)), value.name or ""], lambda *names: _member(*names)),
    }
)
_LEAF_READERS: Final = MappingProxyType({kind.__name__: read for kind, (_, read) in _LEAVES.items()})


class EncodeError(TypeError):
    """A value that another process could not build.

    Args:
        value: a description of the value.
    """

    def __init__(self, value: str) -> None:
        super().__init__(
            f"{value} is to be sent to another process. Between processes only tensors are sent, and None, bool, int, "
            "float, complex, str, bytes, torch.Size, torch.dtype, torch.device, slice, range, ... and members of "
            "enums, in tuples, lists, dicts, named tuples, dataclasses and classes that are registered with "
            "torch.utils._pytree"
        )


def encode(structure: Structure) -> Any:
    """A structure as what `json` can write.

    Raises:
        EncodeError: another process could not build a leaf or a node.

    Example:
        >>> encode(Structure(pytree.tree_structure(["a", (2,)]), (Place(0), "two")))
        [{'$': 'Place', 'items': [0]}, {'$': 'builtins:tuple', 'context': None, 'items': ['two']}]
    """
    return _encode(structure.spec, iter(structure.leaves))


def decode(form: Any, count: int) -> Structure:
    """The structure of what `encode` gave.

    Args:
        form: of a value with tensors.
        count: the number of its tensors.

    Raises:
        ValueError: the form is malformed, or names a class that this process does not know.

    Example:
        >>> decode([{"$": "Place", "items": [0]}, "two"], 1).leaves
        (Place(position=0), 'two')
    """
    leaves: list[Any] = []
    structure = Structure(_decode(form, leaves), tuple(leaves))
    if any(isinstance(leaf, Place) and not 0 <= leaf.position < count for leaf in leaves) or encode(structure) != form:
        raise ValueError(f"{str(form)[:80]} is the form of no value with {count} tensors")
    return structure


def class_name(kind: type) -> str:
    """A class as `module:qualified.name`.

    Raises:
        EncodeError: the class cannot be found by that name, for example because it was defined in a function.

    Example:
        >>> class_name(OrderedDict)
        'collections:OrderedDict'
    """
    full = f"{kind.__module__}:{kind.__qualname__}"
    if _find(full) is not kind:
        raise EncodeError(
            f"the class {_described(kind)}, which cannot be found by its name, as another process would have to "
            "(define it at the top of a module),"
        )
    return full


def named_class(full: Any) -> Any:
    """The class of a name. Only modules that are imported already are searched.

    Raises:
        ValueError: this process does not know the class.

    Example:
        >>> named_class("collections:OrderedDict")
        <class 'collections.OrderedDict'>
    """
    found = _find(full) if isinstance(full, str) else None
    if found is None:
        raise ValueError(
            f"a class {full!r} arrives that this process does not know: import the module that defines it, in every "
            "process, before the first step"
        )
    return found


def _find(full: str) -> type | None:
    module, _, path = full.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part, None)  # `getattr` may run code, or import a module
    return found if issubclass(type(found), type) else None


def _encode(spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    if spec.is_leaf():
        return _encode_leaf(next(leaves))
    items = [_encode(child, leaves) for child in spec.children()]
    if spec.type is list:
        return items
    name, context = _encode_node(spec.type, spec.context)
    return {"$": name, "context": context, "items": items}


def _decode(form: Any, leaves: list[Any]) -> pytree.TreeSpec:
    kind: Any
    context: Any
    match form:
        case list(items):
            kind, context = list, None
        case {"$": str(name), "context": context, "items": list(items)}:
            kind, context = _decode_node(named_class(name), decode_value(context))
        case _:
            leaves.append(_decode_leaf(form))
            return pytree.tree_structure(None)
    names = context._fields if kind is namedtuple else context[1] if kind is DataclassNode else context
    if kind in (namedtuple, DataclassNode, dict, OrderedDict) and len(names) != len(items):
        raise ValueError(f"{len(items)} values arrive for {str(names)[:80]}")
    return pytree.TreeSpec(kind, context, [_decode(item, leaves) for item in items])


def encode_value(value: Any) -> Any:
    """A value without tensors as what `json` can write; see `encode`."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda each: type(each) is torch.Size)
    return _encode(spec, iter(leaves))


def decode_value(form: Any) -> Any:
    """The value of what `encode_value` gave."""
    leaves: list[Any] = []
    spec = _decode(form, leaves)
    return pytree.tree_unflatten(leaves, spec)


def _encode_node(kind: Any, context: Any) -> tuple[str, Any]:
    """The class of a node, and what a node remembers beside its children, such as the keys of a dict."""
    if kind is namedtuple:
        kind, context = context, None
    elif kind is DataclassNode:
        kind, context = context
        _check_dataclass(kind, context)
    return class_name(kind), encode_value(context)


def _decode_node(kind: Any, context: Any) -> tuple[Any, Any]:
    if kind in pytree.SUPPORTED_NODES and kind is not DataclassNode:
        return kind, context
    if pytree.is_namedtuple_class(kind):
        return namedtuple, kind
    if dataclasses.is_dataclass(kind):
        _check_dataclass(kind, context)
        return DataclassNode, (kind, tuple(context))
    raise ValueError(
        f"{_described(kind)} is not registered with PyTorch's pytree in this process: register it in every process, "
        "before the first step"
    )


def _encode_leaf(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return encode_scalar(value)
    if dataclasses.is_dataclass(kind):  # one without tensors
        return {"$": "dataclass", "items": [encode_value(DataclassNode.of(value))]}
    row = Enum if isinstance(value, Enum) else kind
    if row not in _LEAVES:
        raise EncodeError(f"a value of type {_described(kind)}")
    items = _LEAVES[row][0](value)
    if row is Enum and kind.__members__.get(items[1]) is not value:  # such as the union of two members of a Flag
        raise EncodeError(f"a value of type {_described(kind)} that is no member of it")
    return {"$": row.__name__, "items": list(map(encode_value, items))}


def _decode_leaf(form: Any) -> Any:
    match form:
        case {"$": "dataclass", "items": [node]}:
            return decode_value(node)
        case {"$": str(name), "items": list(items)} if name in _LEAF_READERS:
            return _LEAF_READERS[name](*map(decode_value, items))
    return decode_scalar(form) if isinstance(form, dict) else form


def _member(name: str, member: str) -> Any:
    kind = named_class(name)
    if not issubclass(kind, Enum) or member not in kind.__members__:
        raise ValueError(f"{_described(kind)} is no enum with the member {member}")
    return kind.__members__[member]


def _check_dataclass(kind: Any, names: tuple[str, ...]) -> None:
    """Raises an EncodeError unless an instance can be made from these fields alone: the class may also be a list."""
    if not dataclasses.is_dataclass(kind) or not {field.name for field in dataclasses.fields(kind)}.issuperset(names):
        raise EncodeError(f"{_described(kind)} is no dataclass with the fields {str([*names])[:80]} in this process")
    try:
        object.__new__(kind)  # type: ignore[arg-type]  # runs no __init__
    except TypeError as error:
        raise EncodeError(f"a value of type {_described(kind)} ({error})") from None


def _described(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
