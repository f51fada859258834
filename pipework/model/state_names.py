"""Names of tensors in a state dict of layers; parts of a model have the model's own names, wherever it was cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

_PREFIX: Final = "state_prefix"  # attribute of a part of a model: the first letters of the part's own names of tensors


def state_name(layers: Mapping[str, Any], name: str) -> str:
    """The name of a tensor or a module in a state dict.

    Args:
        layers: by their names.
        name: that the layers' container has for it.

    Example:
        >>> from torch import nn
        >>> state_name({"0": nn.Linear(2, 2)}, "0.weight")
        '0.weight'
        >>> part = nn.Sequential()
        >>> part.state_prefix = "model."
        >>> state_name({"0": part}, "0.model.layers.3.weight")
        'layers.3.weight'
    """
    layer, _, rest = name.partition(".")
    prefix = getattr(layers.get(layer), _PREFIX, None)
    if prefix is None:
        return name
    rest = rest.removeprefix(f"{torch_private.COMPILED_MODULE}.")
    return rest.removeprefix(prefix) if rest.startswith(prefix) else name


def has_own_names(layers: Mapping[str, Any]) -> bool:
    """Whether any of the layers is a part of a model."""
    return any(hasattr(layer, _PREFIX) for layer in layers.values())


def state_tensors(container: nn.Module) -> dict[str, list[Tensor]]:
    """The parameters and buffers of layers by their names in a state dict.

    Parts have copies of the buffers that stand beside the model's units, so that a name may be that of several tensors.

    Example:
        >>> from torch import nn
        >>> list(state_tensors(nn.Sequential(nn.Linear(2, 2))))
        ['0.weight', '0.bias']
    """
    found: dict[str, list[Tensor]] = {}
    parameters = container.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *container.named_buffers(remove_duplicate=False)):
        same = found.setdefault(state_name(container._modules, name), [])
        if all(tensor is not each for each in same):
            same.append(tensor)
    return found
