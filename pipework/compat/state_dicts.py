"""Converts state dicts between old and new pipes, which name the same tensors differently."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipework.model.batchnorm import COLLECTED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from torch import nn

_PARTITION = re.compile(r"^(?:module\.)?partitions\.(\d+)\.")  # `DistributedDataParallel` adds "module."

_MEAN = "running_mean"

_Layer = dict[str, str]  # from the name of an entry within the layer to its name in the state dict


def convert_state_dict(state_dict: Mapping[str, Any], to: nn.Module) -> OrderedDict[str, Any]:
    """Renames the entries of a state dict, so that another kind of pipe (or the un-partitioned module) can load it.

    Old pipes name a layer `partitions.<partition>.<layer>`, with the layer's name (torchgpipe, fairscale) or its index
    within the partition (`torch.distributed.pipeline.sync`). `pipework.Pipe` and the un-partitioned module use the
    layer's name alone. Where the names do not identify the layer, layers are matched in their order, so balances may
    differ, and nested sequences may be flat on one side. Indices may be in any order, as in a sorted file.

    Sums that deferred batch norms of old libraries have collected are left out, and are zero where `to` has them.

    A state dict of an optimizer needs no conversion: it numbers the parameters, whose order is the same in all pipes.

    Args:
        state_dict: of a pipe of any kind, or of the un-partitioned module.
        to: the module that will load it: a `pipework.Pipe`, one of the adapters, or an `nn.Sequential`.

    Returns:
        The same tensors under the names of `to`.

    Raises:
        ValueError: the argument is not the state dict of a model; or it has another number of layers, or other entries
            in a layer; or the order of its layers has been lost. The last is not noticed where each layer has one
            entry.

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
    if state_dict and not any(isinstance(value, Tensor) for value in state_dict.values()):
        raise ValueError(
            "there is no tensor in it, so this is no state dict of a model; it has the keys "
            f"{_listed(state_dict)}: give the entry that the model's state was saved under"
        )
    own = to.state_dict()
    given, wanted = _without_collected(state_dict), _without_collected(own)
    names = _same_names(given, wanted)
    if names is None:
        names = _same_order(given, wanted, type(to).__name__)
    found = {name: state_dict[old] for name, old in names.items()}
    return OrderedDict((name, found[name] if name in found else _collected(name, names, state_dict)) for name in own)


def _without_collected(names: Iterable[str]) -> list[str]:
    """All names except those of the sums that deferred batch norms collect during a mini-batch."""
    names = list(names)
    batch_norms = [name.removesuffix(_MEAN) for name in names if name.split(".")[-1] == _MEAN]
    collected = {prefix + name for prefix in batch_norms for name in COLLECTED}
    return [name for name in names if name not in collected]


def _collected(name: str, names: Mapping[str, str], state_dict: Mapping[str, Any]) -> Any:
    """The sums of a deferred batch norm; zeros if the state dict does not have them."""
    last = name.split(".")[-1]
    mean = names[name.removesuffix(last) + _MEAN]
    old = mean.removesuffix(_MEAN) + last
    return state_dict[old] if old in state_dict else torch.zeros_like(state_dict[mean])


def _same_names(given: Collection[str], wanted: Collection[str]) -> dict[str, str] | None:
    """For each wanted name the given one, if the names of both sides differ only in the partition.

    This does not hold for indices within partitions, which start at 0 in each partition.
    """
    if _begins_anew(given) or _begins_anew(wanted):
        return None
    old, new = ({_PARTITION.sub("", name): name for name in names} for names in (given, wanted))
    if old.keys() != new.keys() or len(old) < len(given) or len(new) < len(wanted):
        return None
    return {new[name]: old[name] for name in new}


def _begins_anew(names: Iterable[str]) -> bool:
    """Whether the layers' names look like indices within the partitions."""
    places = {_parts(name)[:2] for name in names}
    if not all(layer.isdecimal() for _, layer in places):
        return False
    indices = [layer for _, layer in sorted((int(partition), int(layer)) for partition, layer in places)]
    return indices != sorted(set(indices))


def _same_order(names: Iterable[str], wanted_names: Iterable[str], target: str) -> dict[str, str]:
    """For each wanted name the given one, by the order of the layers.

    A nested `nn.Sequential` is one layer on one side and may be several on the other.
    """
    pairs: list[tuple[_Layer, _Layer]] = []
    given, wanted = _layers(names)[::-1], _layers(wanted_names)[::-1]  # stacks, with the first layer on top
    while given and wanted:
        old, new = given[-1], wanted[-1]
        if old.keys() == new.keys():
            pairs.append((given.pop(), wanted.pop()))
        elif not _opened(given if "".join(old).count(".") > "".join(new).count(".") else wanted):  # the deeper one
            raise ValueError(
                f"layer {len(pairs)} has the entries {_listed(old)} in the state dict, and {_listed(new)} in {target}"
            )
    if given or wanted:
        raise ValueError(
            f"the state dict has {len(pairs) + len(given)} layers with entries, and {target} has "
            f"{len(pairs) + len(wanted)}"
        )
    if _is_order_needed(names) and any(list(old) != list(new) for old, new in pairs):
        raise ValueError(
            "the entries of the state dict are not in the order of the layers (perhaps a file was sorted by name), and "
            f"the layers are called otherwise in {target}: load it into a module with the old names first, and convert "
            "that module's state dict"
        )
    return {new[entry]: old[entry] for old, new in pairs for entry in new}


def _layers(names: Iterable[str]) -> list[_Layer]:
    """The entries of each layer, in the order of the layers."""
    layers: dict[tuple[str, str], _Layer] = {}
    for name in names:
        partition, layer, entry = _parts(name)
        layers.setdefault((partition, layer), {})[entry] = name
    ordered = _ordered_by_names(layers)  # files may have brought indices into another order
    places = sorted(layers, key=lambda place: (int(place[0]), int(place[1]) if place[0] in ordered else 0))
    return [layers[place] for place in places]


def _parts(name: str) -> tuple[str, str, str]:
    """Partition, layer and entry; a name without a partition is in partition 0."""
    old = _PARTITION.match(name)
    layer, _, entry = (name[old.end() :] if old else name).partition(".")
    return old[1] if old else "0", layer, entry


def _ordered_by_names(places: Iterable[tuple[str, str]]) -> set[str]:
    """The partitions whose layers are named by their indices."""
    partitions: dict[str, list[str]] = {}
    for partition, layer in places:
        partitions.setdefault(partition, []).append(layer)
    return {partition for partition, layers in partitions.items() if all(layer.isdecimal() for layer in layers)}


def _is_order_needed(names: Iterable[str]) -> bool:
    """Whether a partition has several layers whose names do not give their order."""
    places = {_parts(name)[:2] for name in names}
    partitions = [partition for partition, _ in places]
    return any(partitions.count(partition) > 1 for partition in set(partitions) - _ordered_by_names(places))


def _opened(stack: list[_Layer]) -> bool:
    """Replaces the sequence on top of the stack by its layers; False if it is not a sequence."""
    inner = _layers(stack[-1])
    if any("" in layer for layer in inner):
        return False
    whole = stack.pop()
    stack.extend({entry: whole[name] for entry, name in layer.items()} for layer in reversed(inner))
    return True


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
