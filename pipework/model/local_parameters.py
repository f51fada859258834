"""Parameters that processes have values of their own of, chosen by patterns of names."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipework.model.state_names import state_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

Dimensions = tuple[str, ...] | None
"""Those of a mesh, by name; None: all."""


def patterns_of(given: Sequence[str] | Mapping[str, str | Sequence[str]]) -> dict[str, Dimensions]:
    """What a user has given, in one form: for each pattern the dimensions over which its parameters are local.

    Raises:
        TypeError: it is neither a sequence of texts nor a mapping from texts to one text or several.

    Example:
        >>> patterns_of(["*.experts.*"]), patterns_of({"*.experts.*": "ep"})
        ({'*.experts.*': None}, {'*.experts.*': ('ep',)})
    """
    found: dict[str, Dimensions]
    if isinstance(given, Mapping):
        found = {name: (over,) if isinstance(over, str) else tuple(over or ()) for name, over in given.items()}
    else:
        found = dict.fromkeys([] if isinstance(given, str) else given)
    texts = [*found, *(name for over in found.values() for name in over or ())]
    if isinstance(given, str) or () in found.values() or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            "local_parameters is a list of names, such as ['*.experts.*'], or says over which dimensions of the mesh "
            f"they are local, such as {{'*.experts.*': 'ep'}}: got {given!r}"
        )
    return found


def local_dimensions(module: nn.Sequential, patterns: Mapping[str, Dimensions]) -> dict[str, Dimensions]:
    """The parameters that match any of the patterns, in which ``*`` stands for any characters, with their dimensions.

    A parameter that matches several is local over the dimensions of all of them.

    Raises:
        ValueError: a pattern matches no parameter of the model.

    Example:
        >>> from torch import nn
        >>> local_dimensions(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"1.*": ("ep",), "1.b*": None})
        {'1.weight': ('ep',), '1.bias': None}
    """
    if not patterns:
        return {}
    names = [state_name(module._modules, name) for name, _ in module.named_parameters(remove_duplicate=False)]
    found: dict[str, Dimensions] = {}
    for pattern, over in patterns.items():
        matching = fnmatch.filter(names, pattern)
        if not matching:
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise ValueError(f"local_parameters has {pattern!r}, which matches no parameter of the model: {some}")
        for name in matching:
            before = found.get(name, ())
            found[name] = None if over is None or before is None else tuple(sorted({*before, *over}))
    return found
