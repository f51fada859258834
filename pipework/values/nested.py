"""A value that crosses a stage boundary, flattened to a tuple of tensors and the structure that rebuilds it.

Layers exchange nested values: tuples, lists, dicts, dataclasses, None, plain values. Workers send each other the flat
tuple of tensors. The structure is mostly the same for every micro-batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from types import BuiltinMethodType, EllipsisType, FunctionType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
from torch import Tensor

from pipework.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_COLLECTIONS: Final[tuple[type, ...]] = (set, frozenset, type({}.keys()), type({}.values()))
_SEQUENCE_ITERATORS: Final[tuple[type, ...]] = (type(iter([])), type(iter(())))
_LAZY_ITERATORS: Final = (GeneratorType, map, filter, zip)
_LOOKED_AT: Final = 64  # of the elements of a collection, which may be a large one of plain values
_PLAIN: Final = (bool, int, str, bytes, EllipsisType, torch.Size, torch.dtype, torch.device)


class Place(NamedTuple):
    """Stands for a tensor among the leaves: its position in the flat tuple. A tensor that occurs twice is sent once."""

    position: int


class Structure(NamedTuple):
    """A value without its tensors: its nesting, and its leaves with a `Place` for each tensor."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]


class DataclassNode:
    """A dataclass that holds tensors, as a node of PyTorch's pytree, where users' classes are not registered."""

    def __init__(self, kind: type, names: tuple[str, ...], values: list[Any]) -> None:
        self.kind = kind
        self.names = names
        self.values = values

    @classmethod
    def of(cls, instance: Any) -> Self:
        """A dataclass, opened."""
        fields = fields_of(instance)
        return cls(type(instance), tuple(fields), list(fields.values()))

    def rebuilt(self) -> Any:
        """An instance with these values. No `__init__` runs."""
        instance: Any = object.__new__(self.kind)
        for name, value in zip(self.names, self.values, strict=True):
            object.__setattr__(instance, name, value)  # also where the class is frozen
        return instance


pytree.register_pytree_node(
    DataclassNode,
    lambda node: (node.values, (node.kind, node.names)),
    lambda values, context: DataclassNode(context[0], context[1], list(values)).rebuilt(),
)


def flatten(value: Any) -> tuple[tuple[Tensor, ...], Structure | None]:
    """Separates the tensors from a value. The structure of a single tensor is None, the fast and common case.

    It flattens tuples, named tuples, lists, dicts, dataclasses, and classes that are registered with PyTorch's pytree,
    such as `ModelOutput` of transformers. Any other object is a plain value.

    Raises:
        TypeError: a plain value holds a tensor that requires a gradient, which would be lost, or is an iterator.

    Example:
        >>> import torch
        >>> tensors, structure = flatten((torch.zeros(2), 5))
        >>> len(tensors), unflatten(tensors, structure)[1]
        (1, 5)
    """
    if isinstance(value, Tensor):
        return (value,), None
    leaves, spec = leaves_of(value)
    places: dict[int, Place] = {}
    tensors: list[Tensor] = []
    marked: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if id(leaf) not in places:
                places[id(leaf)] = Place(len(tensors))
                tensors.append(leaf)
            marked.append(places[id(leaf)])
        else:
            _refuse_hidden_gradients(leaf)
            marked.append(leaf)
    return tuple(tensors), Structure(spec, tuple(marked))


def leaves_of(value: Any, kinds: type | tuple[type, ...] = Tensor) -> tuple[list[Any], pytree.TreeSpec]:
    """What `pytree.tree_flatten` gives, if dataclasses that hold leaves of these kinds are opened, too.

    Example:
        >>> Size = dataclasses.make_dataclass("Size", ["rows"])
        >>> leaves, spec = leaves_of([Size(torch.ones(1)), Size(3)])
        >>> leaves, pytree.tree_unflatten(leaves, spec)[1]
        ([tensor([1.]), Size(rows=3)], Size(rows=3))
    """
    leaves, spec = pytree.tree_flatten(value)
    if not any(_holds(leaf, kinds) for leaf in leaves):
        return leaves, spec
    opened = [DataclassNode.of(leaf) if _holds(leaf, kinds) else leaf for leaf in leaves]
    return leaves_of(pytree.tree_unflatten(opened, spec), kinds)


def unflatten(tensors: tuple[Tensor, ...], structure: Structure | None) -> Any:
    """Rebuilds a value from tensors in the order in which `flatten` returned them."""
    if structure is None:
        return tensors[0]
    leaves = [tensors[leaf.position] if isinstance(leaf, Place) else leaf for leaf in structure.leaves]
    return pytree.tree_unflatten(leaves, structure.spec)


def replaced(value: Any, kind: type | tuple[type, ...], replacement: Callable[[Any], Any]) -> Any:
    """The value with every leaf of a type, or of one of several, replaced, also in dataclasses."""
    leaves, spec = leaves_of(value, kind)
    return pytree.tree_unflatten([replacement(leaf) if isinstance(leaf, kind) else leaf for leaf in leaves], spec)


def same(left: Any, right: Any) -> bool:
    """Whether two values, structures or tree specs are the same, exactly. Any other object is the same only as itself.

    1 is not True, 0.0 is not -0.0, and NaN is NaN. It calls no `__eq__` of other classes, which may raise an error or
    return an array. PyTorch's own comparison of tree specs treats the keys 1 and True as equal.

    Example:
        >>> same([float("nan")], [float("nan")]), same((1,), (1.0,))
        (True, False)
    """
    if left is right:
        return True
    kind = type(left)
    if kind is not type(right):
        return False
    if kind is float or kind is complex:
        return repr(left) == repr(right)  # distinguishes 0.0 from -0.0, and equals for NaN
    if kind in _PLAIN:
        return bool(left == right)
    if issubclass(kind, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if kind is pytree.TreeSpec:
        return left.type is right.type and same((left.context, left.children()), (right.context, right.children()))
    if kind is slice or kind is range:
        return same((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    if kind in pytree.SUPPORTED_NODES:  # in a dataclass, or in the context of a registered class
        return same(pytree.tree_flatten(left), pytree.tree_flatten(right))
    if dataclasses.is_dataclass(kind):
        return same([*fields_of(left).items()], [*fields_of(right).items()])
    return False


def same_nesting(left: Structure | None, right: Structure | None) -> bool:
    """Whether two values have tensors and plain values at the same positions."""
    if left is None or right is None:
        return left is right
    return left.spec == right.spec and all(
        a == b if isinstance(a, Place) else not isinstance(b, Place)
        for a, b in zip(left.leaves, right.leaves, strict=True)
    )


def collect(structures: Sequence[Structure | None], *, equal_once: bool = False) -> Structure | None:
    """One structure for values of the same nesting: each plain value becomes the list of the values of all.

    Args:
        structures: of the values.
        equal_once: whether plain values that are the same for all become one value.

    Example:
        >>> import torch
        >>> _, structure = flatten((torch.zeros(1), 5))
        >>> unflatten((torch.zeros(1),), collect([structure, structure]))
        (tensor([0.]), [5, 5])
    """
    first = structures[0]
    if first is None:
        return None

    def is_one(column: tuple[Any, ...]) -> bool:
        return isinstance(column[0], Place) or (equal_once and all(same(column[0], each) for each in column))

    columns = zip(*(structure.leaves for structure in structures if structure is not None), strict=True)
    return Structure(first.spec, tuple([column[0] if is_one(column) else list(column) for column in columns]))


def reduced(structure: Structure | None, kept: Sequence[int]) -> Structure | None:
    """The structure of a value with None in place of the tensors that are not kept.

    Args:
        structure: of the value.
        kept: the positions of the other tensors.

    Example:
        >>> import torch
        >>> (_, second), structure = flatten((torch.zeros(1), torch.ones(1)))
        >>> unflatten((second,), reduced(structure, [1]))
        (None, tensor([1.]))
    """
    if structure is None:
        return None if kept else flatten(None)[1]
    places = {position: Place(number) for number, position in enumerate(kept)}
    leaves = [places.get(leaf.position) if isinstance(leaf, Place) else leaf for leaf in structure.leaves]
    return structure._replace(leaves=tuple(leaves))


def describe(structure: Structure | None) -> str:
    """The nesting as text for an error message, such as `(tensor, int)`."""
    if structure is None:
        return "tensor"
    leaves = ["tensor" if isinstance(leaf, Place) else type(leaf).__name__ for leaf in structure.leaves]
    return str(pytree.tree_unflatten(leaves, structure.spec)).replace("'", "")


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds under names, in its `__dict__` or in slots."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


def fields_of(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass that have a value."""
    names = [field.name for field in dataclasses.fields(instance)]
    return {name: getattr(instance, name) for name in names if hasattr(instance, name)}


def _holds(leaf: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether a leaf is a dataclass that holds leaves of these kinds."""
    if isinstance(leaf, type) or not dataclasses.is_dataclass(leaf):
        return False
    inside = pytree.tree_leaves(list(fields_of(leaf).values()))
    return any(isinstance(each, kinds) or _holds(each, kinds) for each in inside)


def _refuse_hidden_gradients(leaf: Any) -> None:
    """Refuses a tensor inside an object that pytree cannot flatten: it would cross the boundary with its graph."""
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes)):
        return
    lost = "would be lost where the value leaves its partition or the pipe. Return the tensors themselves, in a tuple, "
    if isinstance(leaf, _LAZY_ITERATORS) and torch.is_grad_enabled():
        raise TypeError(
            f"a value of type {type(leaf).__name__} yields what it holds only when it is read, so that gradients of "
            f"its tensors {lost}list, dict or dataclass"
        )
    for place, found in _contents(leaf):
        if isinstance(found, Tensor) and found.requires_grad:
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
            raise TypeError(
                f"a value of type {kind} holds a tensor that requires a gradient ({place}), which {lost}dict or "
                "dataclass, or register the type with torch.utils._pytree.register_pytree_node"
            )


def _contents(leaf: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, and where, as far as that can be seen without running its code."""
    yield from ((f".{name}", found) for name, found in attributes_of(leaf).items())
    if not torch.is_grad_enabled():  # what follows mostly holds parameters that a layer may read without a gradient
        return
    if type(leaf) in _SEQUENCE_ITERATORS:
        (sequence,) = leaf.__reduce__()[1]  # which it reads
        yield from (("among its elements", each) for each in sequence[:_LOOKED_AT])
    elif type(leaf) in _COLLECTIONS:
        yield from (("among its elements", each) for each in itertools.islice(leaf, _LOOKED_AT))
    elif isinstance(leaf, FunctionType):
        for cell in leaf.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                yield "in its closure", cell.cell_contents
        yield from (("among its defaults", each) for each in leaf.__defaults__ or ())
    elif isinstance(leaf, functools.partial):
        yield from (("among its arguments", each) for each in (*leaf.args, *leaf.keywords.values()))
    elif isinstance(leaf, BuiltinMethodType | MethodType):
        yield "as its object", leaf.__self__
