"""The skip connections of a model: which stages they join, and whether every stash has its pop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipework.model.sequential import WithDevice
from pipework.skip.decorator import Skippable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from pipework.skip.decorator import SkipKey


@dataclass(frozen=True)
class SkipEdge:
    """One skip connection between stages.

    Attributes:
        key: namespace and name. Each process that builds the model makes namespaces of its own; the position of an edge
            in `skip_edges` is the same in all of them.
        source: the stage that stashes.
        destinations: the stages that pop, in ascending order without repeats; the source may be among them.
    """

    key: SkipKey
    source: int
    destinations: tuple[int, ...]


def skip_edges(stages: Sequence[Iterable[nn.Module]]) -> tuple[SkipEdge, ...]:
    """The skip connections of a model that has passed `verify_skippables`.

    Returns:
        One edge for each skip connection, in the order in which they are stashed.

    Example:
        >>> from torch import nn
        >>> from pipework.skip import pop, skippable, stash
        >>> @skippable(stash=["identity"])
        ... class Fork(nn.Module):
        ...     def forward(self, x):
        ...         yield stash("identity", x)
        ...         return x
        >>> @skippable(pop=["identity"])
        ... class Join(nn.Module):
        ...     def forward(self, x):
        ...         return x + (yield pop("identity"))
        >>> skip_edges([[Fork()], [nn.ReLU()], [Join(), Join()]])
        (SkipEdge(key=(None, 'identity'), source=0, destinations=(2,)),)
    """
    sources: dict[SkipKey, int] = {}
    destinations: dict[SkipKey, list[int]] = {}
    for stage, layers in enumerate(stages):
        for layer in layers:
            for _, found in named_skippables(layer):
                for key in found.stashed_keys():
                    sources[key] = stage
                for key in found.popped_keys():
                    destinations.setdefault(key, []).append(stage)
    return tuple(
        SkipEdge(key, source, tuple(dict.fromkeys(destinations.get(key, ())))) for key, source in sources.items()
    )


def named_skippables(module: nn.Module, name: str = "") -> Iterator[tuple[str, Skippable]]:
    """All skippable layers in and below a module, in the order in which `nn.Sequential` runs them.

    A layer that is used twice is returned twice. Names are dotted; they do not contain `WithDevice`.
    """
    if isinstance(module, Skippable):
        yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            prefix = f"{name}." if name else ""
            yield from named_skippables(child, name if isinstance(module, WithDevice) else prefix + child_name)


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
