"""The skip connections between the stages of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipework.model.sequential import WithDevice
from pipework.skip.decorator import Skippable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from pipework.skip.namespace import SkipKey


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
