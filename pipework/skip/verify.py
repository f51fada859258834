"""Checks that every stashed tensor is popped, and every popped tensor is stashed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pipework.skip.layout import named_skippables

if TYPE_CHECKING:
    from torch import nn

    from pipework.skip.decorator import Skippable
    from pipework.skip.namespace import SkipKey


def verify_skippables(module: nn.Module, *, exclusive: bool = False) -> None:
    """Checks that each skip connection of a model is stashed once and popped later.

    The function finds skippable layers at any depth and assumes that they run in the order of `module.modules()`. It
    gives each layer that stashes the number of layers that will pop, so that several layers can pop outside of a pipe,
    too. `Pipe` calls it when it wraps a model.

    Args:
        module: the whole model.
        exclusive: whether a second layer that pops the same tensor is an error.

    Raises:
        TypeError: one or more pairs of stash and pop do not match. All of them are listed.

    Example:
        >>> from pipework.skip import skippable, stash
        >>> from torch import nn
        >>> @skippable(stash=["identity"])
        ... class Fork(nn.Module):
        ...     def forward(self, x):
        ...         yield stash("identity", x)
        ...         return x
        >>> verify_skippables(nn.Sequential(Fork(), nn.ReLU()))
        Traceback (most recent call last):
        ...
        TypeError: one or more pairs of stash and pop do not match:
        <BLANKLINE>
        * no module declared 'identity' as poppable but stashed
    """
    skippables = list(named_skippables(module))
    pops: Counter[SkipKey] = Counter()
    if faults := _faults(skippables, pops, exclusive):
        bullets = "\n".join(f"* {fault}" for fault in faults)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{bullets}")
    for _, layer in skippables:
        layer.note_poppers(pops)


def _faults(skippables: list[tuple[str, Skippable]], pops: Counter[SkipKey], exclusive: bool) -> list[str]:
    """The messages of all mismatches; counts in `pops` how often each key is popped."""
    faults: list[str] = []
    stashed: dict[SkipKey, None] = {}
    for name, layer in skippables:
        both = set(layer.stashed_keys()) & set(layer.popped_keys())
        for key in layer.stashed_keys():
            if key in both:
                faults.append(f"'{name}' declared '{key[1]}' both as stashable and as poppable")
            elif key in stashed:
                faults.append(f"'{name}' redeclared '{key[1]}' as stashable but not isolated by namespace")
            else:
                stashed[key] = None
        for key in layer.popped_keys():
            if key in both:
                continue
            if exclusive and key in pops:
                faults.append(f"'{name}' redeclared '{key[1]}' as poppable but not isolated by namespace")
            elif key not in stashed:
                faults.append(f"'{name}' declared '{key[1]}' as poppable but it was not stashed")
            else:
                pops[key] += 1
    return faults + [f"no module declared '{key[1]}' as poppable but stashed" for key in stashed if key not in pops]
