"""Layers that another process trains: they have no memory here, and an error says who has their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.fsdp_private import free_shards
from pipework.model.state_names import state_name
from pipework.runtime.stage.layer_errors import layer_text
from pipework.values.dtensor import is_dtensor, local_part, with_local_part

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


_ATTRIBUTE: Final = "_pipework_released"


class _Released:
    """The hooks of a layer that another process trains; as an attribute of the layer it refuses to be copied."""

    def __init__(self, name: str, layer: nn.Module, owner: str) -> None:
        self.owner = owner
        self._layer = layer  # kept, since hooks refer to it weakly, and the model's own module has the hooks of a unit
        self._gone = f"{layer_text(name, layer)} has no values in this process: {owner} trains it"
        layer.register_forward_pre_hook(self._refuse)
        layer.register_state_dict_pre_hook(self._refuse)  # type: ignore[no-untyped-call]
        layer.register_load_state_dict_pre_hook(self._refuse)  # type: ignore[no-untyped-call]
        layer.__dict__[_ATTRIBUTE] = self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses: a copy, or a file, of the whole model would have layers without values."""
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._gone}. Call the pipe itself, pipe(x), on all ranks. Load a state dict into the model before the "
            "pipe is made, or a checkpoint into the pipe with pipework.load_checkpoint. pipe.state_dict() has the "
            "layers of this process; pipework.save_checkpoint saves those of all, and `python -m pipework convert` "
            "turns the checkpoint into a state dict of the whole model; pipework.save_pretrained writes a model of "
            "transformers"
        )


def release_layers(layers: Iterable[tuple[str, nn.Module, str]], kept: Collection[nn.Module]) -> None:
    """Moves layers to the meta device, which frees their memory; afterwards a call or a state dict of them raises.

    Parameters and buffers become new objects, so that another holder of the old ones, such as a second model, is not
    disturbed. A layer without any stays as it is.

    Args:
        layers: for each its name, the layer, and who trains it, for the error's message.
        kept: layers of this process; what they share with the others stays.

    Example:
        >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> release_layers([("1", second, "rank 1")], [first])
        >>> first.weight.device.type, second.weight.device.type
        ('cpu', 'meta')
    """
    own = {id(tensor) for layer in kept for tensor in (*layer.parameters(), *layer.buffers())}
    own_modules = {id(module) for layer in kept for module in layer.modules()}

    def released(tensor: Tensor) -> Tensor:
        if id(tensor) in own or tensor.is_meta:
            return tensor
        if is_dtensor(tensor):
            return with_local_part(torch.empty_like(local_part(tensor), device="meta"), tensor)
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # it need not know this operator
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return torch.empty_like(tensor, device="meta")

    for name, layer, owner in layers:
        tensors = [*layer.parameters(), *layer.buffers()]
        if id(layer) in own_modules or all(id(tensor) in own for tensor in tensors) or _ATTRIBUTE in layer.__dict__:
            continue
        for parameter in layer.parameters():
            if id(parameter) not in own:
                parameter.grad = None
        torch_private.apply_to_tensors(layer, released)
        free_shards([layer])
        for path, parameter in layer.named_parameters():
            if id(parameter) not in own:  # an attribute, as PyTorch swaps no tensor that is referred to weakly
                setattr(parameter, _ATTRIBUTE, (state_name({name: layer}, f"{name}.{path}"), owner))
        _Released(name, layer, owner)
        # The units of a part of a model share their hooks with the model's own modules.
        units: dict[str, nn.Module] = getattr(layer, "units_here", dict)()
        for unit_name, unit in units.items():
            if any(id(tensor) not in own for tensor in (*unit.parameters(), *unit.buffers())):
                _Released(unit_name, unit, owner)


def released_from(parameter: Tensor) -> tuple[str, str] | None:
    """The name in the model of a parameter that another process trains, and who trains it; None: this one trains it."""
    return getattr(parameter, _ATTRIBUTE, None)


def refuse_released(partitions: Iterable[nn.Sequential]) -> None:
    """Raises a ValueError if a layer has given up its values, because another process trains it in another pipe."""
    for name, module in (named for partition in partitions for named in partition.named_modules()):
        released = getattr(module, _ATTRIBUTE, None)
        tensors = (released_from(each) for each in module._parameters.values() if each is not None)
        owners = [*([released.owner] if released is not None else []), *(each[1] for each in tensors if each)]
        if owners:
            raise ValueError(
                f"layer {name!r} gave up its values when a pipe was made of this model before: {owners[0]} has "
                "them. Make the model again for a second pipe, and load a checkpoint of the first into it"
            )
