"""Whether two values are the same, exactly: 1 is not True, 0.0 is not -0.0, NaN is NaN.

It calls no `__eq__` of other classes, which may raise an error or return an array. PyTorch's own comparison of tree
specs treats the keys 1 and True as equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pipework.torch_private import pytree
from pipework.values import nested, structure_json


def same(left: Any, right: Any) -> bool:
    """Whether two values, structures or tree specs are the same. Any other object is the same only as itself.

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
    if kind in structure_json.KEY_TYPES:
        return bool(left == right)
    if issubclass(kind, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if kind is pytree.TreeSpec:
        return (
            left.type is right.type
            and left.num_leaves == right.num_leaves
            and same(left.context, right.context)
            and same(left.children(), right.children())
        )
    if kind is slice or kind is range:
        return same((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    if kind in pytree.SUPPORTED_NODES:  # in a dataclass, or in the context of a registered class
        return same(pytree.tree_flatten(left), pytree.tree_flatten(right))
    if dataclasses.is_dataclass(kind):
        one, two = nested.fields_of(left), nested.fields_of(right)
        return [*one] == [*two] and same([*one.values()], [*two.values()])
    return False
