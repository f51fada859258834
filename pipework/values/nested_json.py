"""A value without its tensors in the form of JSON: the nesting, PyTorch's `TreeSpec`, and its plain leaves.

The form of a structure is `[node, leaves]`. The node of a leaf is null, any other is `[kind, about, children]`; what
`about` holds depends on the kind, such as the keys of a dict or the name of a class. A peer's nodes are checked, so
that putting them together calls nothing but what this process itself registered with PyTorch's pytree.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import torch

from pipework.torch_private import pytree
from pipework.values import classes, nested, plain_json
from pipework.values.nested import Place, Structure

_NAMED = MappingProxyType({kind.__name__: kind for kind in (tuple, list, dict, OrderedDict, defaultdict, deque)})
_FACTORIES = MappingProxyType({kind.__name__: kind for kind in (list, dict, int, float, set, str)})


class CannotTravel(TypeError):
    """What was found, and where in the value, such as `[0]['mask'].hidden`."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} stands at {where or 'the top'}")
        self.what = what
        self.where = where


def encode(structure: Structure) -> Any:
    """A structure as what `json` can write.

    Raises:
        CannotTravel: another process could not make a leaf or a node anew.

    Example:
        >>> encode(Structure(pytree.tree_structure({"a": 1, "b": (2,)}), (Place(0), "two")))
        [['dict', ['a', 'b'], [None, ['tuple', None, [None]]]], [['place', 0], 'two']]
    """
    leaves = []
    for index, leaf in enumerate(structure.leaves):
        try:
            leaves.append(["place", leaf.position] if isinstance(leaf, Place) else _encode_leaf(leaf))
        except CannotTravel as refusal:
            raise CannotTravel(refusal.what, paths(structure.spec)[index] + refusal.where) from None
        except TypeError as error:
            raise CannotTravel(str(error), paths(structure.spec)[index]) from None
    try:
        return [_encode_node(structure.spec), leaves]
    except CannotTravel:
        raise
    except TypeError as error:
        raise CannotTravel(str(error), "") from None


def decode(form: Any, count: int) -> Structure:
    """The structure of what `encode` gave, around a number of tensors.

    Raises:
        ValueError: what arrived is malformed, or tells of a class that this process does not know.

    Example:
        >>> decode([["list", None, [None, None]], [["place", 0], "two"]], 1).leaves
        (Place(position=0), 'two')
    """
    match form:
        case [node, [*forms]]:
            spec, leaves = _decode_node(node), tuple([_decode_leaf(leaf, count) for leaf in forms])
        case _:
            raise ValueError(f"{str(form)[:80]!r} stands for no structure")
    if spec.num_leaves != len(leaves):
        raise ValueError(f"{len(leaves)} values arrive for {spec.num_leaves} places")
    return Structure(spec, leaves)


def paths(spec: pytree.TreeSpec) -> list[str]:
    """Where each leaf sits, in the words of Python.

    Example:
        >>> paths(pytree.tree_structure({"a": 1, "b": (2, 3)}))
        ["['a']", "['b'][0]", "['b'][1]"]
    """
    if spec.is_leaf():
        return [""]
    steps = [f"[{index}]" for index in range(spec.num_children)]
    if spec.type is dict or spec.type is OrderedDict:
        steps = [f"[{key!r}]" for key in spec.context]
    elif spec.type is defaultdict:
        steps = [f"[{key!r}]" for key in spec.context[1]]
    elif spec.type is namedtuple:
        steps = [f".{name}" for name in spec.context._fields]
    elif spec.type is nested._Fields:
        steps = [f".{name}" for name in spec.context[1]]
    return [step + path for step, child in zip(steps, spec.children(), strict=True) for path in paths(child)]


def _encode_leaf(leaf: Any) -> Any:
    """A dataclass is a leaf if it holds no tensor. It travels as the node that it would be with one."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return plain_json.encode(leaf)
    kind = type(leaf)
    try:
        _check_blank(kind)
    except ValueError as error:
        raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} ({error})") from None
    fields = nested._fields(leaf)
    return ["dataclass", *encode(_whole(nested._Fields(kind, tuple(fields), list(fields.values()))))]


def _decode_leaf(form: Any, count: int) -> Any:
    match form:
        case ["place", int(position)]:
            if isinstance(position, bool) or not 0 <= position < count:
                raise ValueError(f"tensor {position} of {count} is asked for")
            return Place(position)
        case ["dataclass", ["fields", _, _] as node, leaves]:
            return nested.unflatten((), decode([node, leaves], 0))
    return plain_json.decode(form)


def _whole(value: Any) -> Structure:
    """What holds no tensors. PyTorch's pytree would give back a `torch.Size` as a tuple."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda node: type(node) is torch.Size)
    return Structure(spec, tuple(leaves))


def _encode_node(spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return None
    kind, context = spec.type, spec.context
    name: str = kind.__name__
    about: Any = None
    if kind is dict or kind is OrderedDict:
        about = list(map(plain_json.key, context))
    elif kind is defaultdict:
        about = [_factory_name(context[0]), list(map(plain_json.key, context[1]))]
    elif kind is deque:
        about = context
    elif kind is namedtuple:
        name, about = "namedtuple", classes.name(context)
    elif kind is nested._Fields:
        name, about = "fields", [classes.name(context[0]), list(context[1])]
    elif kind not in (tuple, list):
        name, about = "class", [classes.name(kind), _encode_context(kind, context)]
    return [name, about, [_encode_node(child) for child in spec.children()]]


def _decode_node(form: Any) -> pytree.TreeSpec:
    if form is None:
        return pytree.tree_structure(None)
    match form:
        case [str(name), about, [*inner]]:
            children = [_decode_node(child) for child in inner]
        case _:
            raise ValueError(f"{str(form)[:80]!r} stands for no nesting")
    match name, about:
        case "tuple" | "list", None:
            return pytree.TreeSpec(_NAMED[name], None, children)
        case "dict" | "OrderedDict", [*forms]:
            return pytree.TreeSpec(_NAMED[name], _keys(forms, children), children)
        case "defaultdict", [factory, [*forms]]:
            made_by = None if factory is None else _FACTORIES[factory]
            return pytree.TreeSpec(defaultdict, [made_by, _keys(forms, children)], children)
        case "deque", None | int():
            if about is not None and not len(children) <= about < 2**31:
                raise ValueError(f"a deque of at most {about} items arrives with {len(children)}")
            return pytree.TreeSpec(deque, about, children)
        case "namedtuple", str():
            return pytree.TreeSpec(namedtuple, _named_tuple(about, len(children)), children)
        case "fields", [kind, [*names]]:
            return pytree.TreeSpec(nested._Fields, _dataclass(kind, names, len(children)), children)
        case "class", [kind, context]:
            known = _registered(kind)
            return pytree.TreeSpec(known, nested.unflatten((), decode(context, 0)), children)
    raise ValueError(f"{str(form)[:80]!r} stands for no nesting")


def _factory_name(factory: Any) -> str | None:
    if factory is None:
        return None
    if factory not in _FACTORIES.values():
        raise TypeError(f"a defaultdict that makes its values with {factory!r}, not {', '.join(_FACTORIES)} or None,")
    return str(factory.__name__)


def _encode_context(kind: type, context: Any) -> Any:
    try:
        return encode(_whole(context))
    except CannotTravel as refusal:
        raise TypeError(
            f"{refusal.what}, in what {kind.__module__}.{kind.__qualname__} was registered with PyTorch's pytree to "
            "remember,"
        ) from None


def _keys(forms: list[Any], children: list[pytree.TreeSpec]) -> list[Any]:
    if len(forms) != len(children):
        raise ValueError(f"a dict of {len(forms)} keys arrives with {len(children)} values")
    return plain_json.keys(forms)


def _named_tuple(name: str, count: int) -> type:
    kind = classes.named(name)
    if not pytree.is_namedtuple_class(kind) or len(kind._fields) != count:  # type: ignore[attr-defined]
        raise ValueError(f"{name!r} is no named tuple of {count} fields in this process")
    return kind


def _dataclass(name: Any, fields: list[Any], count: int) -> tuple[type, tuple[str, ...]]:
    kind = classes.named(name)
    _check_blank(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    if len({*fields}) != count or len(fields) != count or not known.issuperset(fields):
        raise ValueError(f"{name!r} has other fields in this process than {str(fields)[:80]}")
    return kind, tuple(fields)


def _check_blank(kind: type) -> None:
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
    if kind not in pytree.SUPPORTED_NODES or kind in _NAMED.values() or kind is nested._Fields:
        raise ValueError(
            f"{name!r} is not registered with PyTorch's pytree in this process: register it in every process, before "
            "the first step"
        )
    return kind
