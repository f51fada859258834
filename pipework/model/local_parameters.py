"""Parameters and buffers of which each process has its own values, chosen by patterns of names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pipework.model.state_names import state_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

Dimensions = tuple[str, ...] | None
"""Names of dimensions of a mesh; None: all dimensions."""


def patterns_of(given: Sequence[str] | Mapping[str, str | Sequence[str]]) -> dict[str, Dimensions]:
    """What a user has given, in one form: for each pattern the dimensions over which its parameters are local.

    Raises:
        TypeError: it is neither a sequence of texts nor a mapping from texts to one text or several.

    Example:
        >>> patterns_of(["*.experts.*"]), patterns_of({"*.experts.*": "ep"})
        ({'*.experts.*': None}, {'*.experts.*': ('ep',)})
    """
    patterns = None if isinstance(given, str) else texts_of(given)
    if patterns is not None:
        found = {each: texts_of(given[each]) if isinstance(given, Mapping) else None for each in patterns}
        if not isinstance(given, Mapping) or all(found.values()):
            return found
    raise TypeError(
        "local_parameters is a list of names, such as ['*.experts.*'], or says over which dimensions of the mesh they "
        f"are local, such as {{'*.experts.*': 'ep'}}: got {given!r}"
    )


def texts_of(given: object) -> tuple[str, ...] | None:
    """One text or several, as a tuple; None: it is something else.

    Example:
        >>> texts_of("dp"), texts_of(["dp", "ep"]), texts_of(5), texts_of([5])
        (('dp',), ('dp', 'ep'), None, None)
    """
    every = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (None,)
    return every if all(isinstance(each, str) for each in every) else None


def local_dimensions(module: nn.Sequential, patterns: Mapping[str, Dimensions]) -> dict[str, Dimensions]:
    """The parameters and buffers that match any of the patterns, in which ``*`` stands for any characters.

    Returns:
        By each of their names, the dimensions over which they are local: those of all patterns that match any of the
        names, since a tied parameter has several.

    Raises:
        ValueError: a pattern matches nothing of the model.

    Example:
        >>> from torch import nn
        >>> local_dimensions(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"1.*": ("ep",), "1.b*": None})
        {'1.weight': ('ep',), '1.bias': None}
    """
    if not patterns:
        return {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = {state_name(module._modules, name): tensor for name, tensor in tensors}
    over_of: dict[int, Dimensions] = {}
    for pattern, over in patterns.items():
        matching = fnmatch.filter(names, pattern)
        if not matching:
            some = ", ".join([*names][:3]) + (", ..." if len(names) > 3 else "")
            raise ValueError(f"local_parameters has {pattern!r}, which matches no parameter of the model: {some}")
        for name in matching:
            before = over_of.get(id(names[name]), ())
            both = None if over is None or before is None else tuple(sorted({*before, *over}))
            over_of[id(names[name])] = both
    return {name: over_of[id(tensor)] for name, tensor in names.items() if id(tensor) in over_of}
