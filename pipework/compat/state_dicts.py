"""State dicts of old pipes and new ones: the same tensors under other names."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

_PARTITION = re.compile(r"^partitions\.(\d+)\.")

_Layer = dict[str, str]  # from the name of an entry within the layer to its name in the state dict


def convert_state_dict(state_dict: Mapping[str, Any], to: nn.Module) -> OrderedDict[str, Any]:
    """Renames the entries of a state dict, so that another kind of pipe (or the un-partitioned module) can load it.

    Old pipes call a layer `partitions.<partition>.<layer>`, with the layer's name (torchgpipe, fairscale) or its index
    within the partition (`torch.distributed.pipeline.sync`); `pipework.Pipe` and the un-partitioned module call it by
    its name alone. Layers are matched in their order, so balances may differ.

    Args:
        state_dict: of a pipe of any kind, or of the un-partitioned module.
        to: what is to load it: a `pipework.Pipe`, one of the adapters, or an `nn.Sequential`.

    Returns:
        The same tensors under the names that `to` has.

    Raises:
        ValueError: the state dict has entries for another number of layers, or other entries in a layer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> old = {"partitions.0.0.bias": torch.zeros(2), "partitions.1.1.bias": torch.ones(2)}
        >>> model = nn.Sequential(nn.RMSNorm(2), nn.ReLU(), nn.RMSNorm(2))
        >>> list(convert_state_dict(model.state_dict(), model))
        ['0.weight', '2.weight']
        >>> convert_state_dict(old, model)
        Traceback (most recent call last):
        ...
        ValueError: layer 0 has the entries 'bias' in the state dict, and 'weight' in Sequential
    """
    names = _same_names(state_dict, to.state_dict())
    if names is None:
        names = _same_order(_layers(state_dict), _layers(to.state_dict()), type(to).__name__)
    return OrderedDict((new, state_dict[old]) for new, old in names.items())


def _same_names(given: Iterable[str], wanted: Iterable[str]) -> dict[str, str] | None:
    """For each wanted name the given one, if layers are called the same on both sides but for the partition."""
    by_name = {_without_partition(name): name for name in given}
    names = {name: by_name.get(_without_partition(name)) for name in wanted}
    # Indices within partitions begin anew in each: some would occur twice, or not at all.
    complete = {new: old for new, old in names.items() if old is not None}
    return complete if len(complete) == len(names) == len(by_name) == len(list(given)) else None


def _without_partition(name: str) -> str:
    return _PARTITION.sub("", name)


def _same_order(given: list[_Layer], wanted: list[_Layer], target: str) -> dict[str, str]:
    """For each wanted name the given one, by the order of the layers.

    A nested `nn.Sequential` is one layer on one side and may be several on the other.
    """
    names: dict[str, str] = {}
    given, wanted = given[::-1], wanted[::-1]  # stacks, with the first layer on top
    number = 0
    while given and wanted:
        old, new = given[-1], wanted[-1]
        if old.keys() == new.keys():
            names.update({new[entry]: old[entry] for entry in new})
            given.pop()
            wanted.pop()
            number += 1
        elif not _opened(given if _depth(old) > _depth(new) else wanted):
            raise ValueError(
                f"layer {number} has the entries {_listed(old)} in the state dict, and {_listed(new)} in {target}"
            )
    if given or wanted:
        raise ValueError(
            f"the state dict has {number + len(given)} layers with entries, and {target} has {number + len(wanted)}"
        )
    return names


def _layers(names: Iterable[str]) -> list[_Layer]:
    """The entries of each layer, in the order of the layers."""
    layers: dict[tuple[str, ...], _Layer] = {}
    for name in names:
        old = _PARTITION.match(name)
        partition, rest = ((old[1],), name[old.end() :]) if old else ((), name)
        layer, _, entry = rest.partition(".")
        layers.setdefault((*partition, layer), {})[entry] = name
    if all(part.isdecimal() for path in layers for part in path):  # files may have brought them into another order
        return [layers[path] for path in sorted(layers, key=lambda path: tuple(map(int, path)))]
    return list(layers.values())


def _opened(stack: list[_Layer]) -> bool:
    """Puts the layers of the sequence on top of the stack in its place; False if it is no sequence."""
    inner = _layers(stack[-1])
    if any("" in layer for layer in inner):
        return False
    whole = stack.pop()
    stack.extend({entry: whole[name] for entry, name in layer.items()} for layer in reversed(inner))
    return True


def _depth(layer: _Layer) -> int:
    return sum(entry.count(".") for entry in layer)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
