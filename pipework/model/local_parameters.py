"""Parameters that each process has values of its own of, chosen by patterns of names."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from pipework.model.state_names import state_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


def matching_names(module: nn.Sequential, patterns: Sequence[str]) -> frozenset[str]:
    """The names of the parameters that match any of the patterns, in which ``*`` stands for any characters.

    Raises:
        TypeError: `patterns` is no sequence of texts.
        ValueError: a pattern matches no parameter of the model.

    Example:
        >>> from torch import nn
        >>> sorted(matching_names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["1.*"]))
        ['1.bias', '1.weight']
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"local_parameters is a list of names, such as ['*.experts.*']: got {patterns!r}")
    if not patterns:
        return frozenset()
    names = [state_name(module._modules, name) for name, _ in module.named_parameters(remove_duplicate=False)]
    found: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise ValueError(f"local_parameters has {pattern!r}, which matches no parameter of the model: {some}")
        found.update(matching)
    return frozenset(found)
