"""Converts state dicts between old and new pipes, which name the same tensors differently."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from pipework.model.batchnorm import COLLECTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

_PARTITION = re.compile(r"^(?:module\.)?partitions\.(\d+)\.")  # `DistributedDataParallel` adds "module."
_MEAN = "running_mean"

_Layer = dict[str, str]  # from the name of an entry within the layer to its name in the state dict
_Layers = dict[tuple[int, str], _Layer]  # by the partition and the name of each layer, in the order of the layers


def convert_state_dict(state_dict: Mapping[str, Any], to: nn.Module) -> OrderedDict[str, Any]:
    """Renames the entries of a state dict, so that another kind of pipe (or the un-partitioned module) can load it.

    Old pipes name a layer `partitions.<partition>.<layer>`, with the layer's name (torchgpipe, fairscale) or its index
    within the partition (`torch.distributed.pipeline.sync`). `pipework.Pipe` and the un-partitioned module use the
    layer's name alone. Where the names do not identify the layer, layers are matched in their order, so balances may
    differ, and nested sequences may be flat on one side. Indices may be in any order, as in a sorted file.

    Sums that deferred batch norms of old libraries have collected are left out.

    A state dict of an optimizer needs no conversion: it numbers the parameters, whose order is the same in all pipes.

    Args:
        state_dict: of a pipe of any kind, or of the un-partitioned module.
        to: the module that will load it: a `pipework.Pipe`, one of the adapters, or an `nn.Sequential`.

    Returns:
        The same tensors under the names of `to`.

    Raises:
        ValueError: the state dict has another number of layers, or other entries in a layer, such as a checkpoint that
            has the model's state dict among its entries; or the order of its layers has been lost. The last is not
            noticed where each layer has one entry.

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
    own, means = to.state_dict(), [name for name in state_dict if name.split(".")[-1] == _MEAN]
    sums = {mean.removesuffix(_MEAN) + each for mean in means for each in COLLECTED}
    given, wanted = _layers(name for name in state_dict if name not in sums), _layers(own)
    pairs = _same_names(given, wanted) or _same_order(given, wanted, type(to).__name__)
    names = {new[entry]: old[entry] for old, new in pairs for entry in new}
    return OrderedDict((name, state_dict[names[name]]) for name in own)


def _layers(names: Iterable[str]) -> _Layers:
    """The entries of each layer; a name without a partition is in partition 0."""
    layers: _Layers = {}
    for name in names:
        partition = _PARTITION.match(name)
        layer, _, entry = name[partition.end() if partition else 0 :].partition(".")
        layers.setdefault((int(partition[1]) if partition else 0, layer), {})[entry] = name
    # Files may have brought numbers into another order.
    named = _partitions_with_names(layers)
    return dict(sorted(layers.items(), key=lambda item: (item[0][0], 0 if item[0][0] in named else int(item[0][1]))))


def _partitions_with_names(layers: _Layers) -> set[int]:
    """The partitions whose layers are not all called by numbers, which give their order."""
    return {partition for partition, layer in layers if not layer.isdecimal()}


def _same_names(given: _Layers, wanted: _Layers) -> list[tuple[_Layer, _Layer]]:
    """Given and wanted layers with the same names and entries; none unless all layers are such pairs."""
    old, new = ({layer: entries for (_, layer), entries in layers.items()} for layers in (given, wanted))
    if any(map(_begins_anew, (given, wanted))) or {each: {*old[each]} for each in old} != {
        each: {*new[each]} for each in new
    }:
        return []
    return [(old[each], new[each]) for each in new]


def _begins_anew(layers: _Layers) -> bool:
    """Whether a name occurs in several partitions, or numbers start again: they are indices within partitions."""
    names = [layer for _, layer in layers]
    numbers = [int(layer) for layer in names if layer.isdecimal()]
    return len({*names}) < len(names) or (len(numbers) == len(names) and numbers != sorted(numbers))


def _same_order(given: _Layers, wanted: _Layers, target: str) -> list[tuple[_Layer, _Layer]]:
    """Given and wanted layers in their order.

    A nested `nn.Sequential` is one layer on one side and may be several on the other.
    """
    pairs: list[tuple[_Layer, _Layer]] = []
    olds, news = [*given.values()][::-1], [*wanted.values()][::-1]  # stacks, with the first layer on top
    while olds or news:
        old, new = (stack[-1] if stack else {} for stack in (olds, news))
        deeper = max((news, olds), key=lambda stack: "".join(stack[-1]).count(".") if stack else -1)
        if old.keys() == new.keys():
            pairs.append((olds.pop(), news.pop()))
        elif not _opened(deeper):
            raise ValueError(
                f"layer {len(pairs)} has the entries {_listed(old)} in the state dict, and {_listed(new)} in {target}"
            )
    named = _partitions_with_names(given)
    unnumbered = [partition for partition, _ in given if partition in named]
    if len({*unnumbered}) < len(unnumbered) and any(list(old) != list(new) for old, new in pairs):
        raise ValueError(
            f"the state dict is not in the order of the layers, and {target} calls them otherwise (perhaps a file was "
            "sorted by name): load it into a module with the old names, and convert the state dict of that module"
        )
    return pairs


def _opened(stack: list[_Layer]) -> bool:
    """Replaces the sequence on top of the stack by its layers; False if it is not a sequence."""
    inner = _layers(stack[-1]).values()
    if any("" in layer for layer in inner):
        return False
    whole = stack.pop()
    stack.extend({entry: whole[name] for entry, name in layer.items()} for layer in reversed(inner))
    return True


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
