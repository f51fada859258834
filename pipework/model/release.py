"""Layers that another process trains: they have no memory here, and an error says who has their values.

So does what would silently work with the layers of this process alone: an optimizer, and a norm of gradients.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pipework import torch_private
from pipework.fsdp_private import free_shards
from pipework.model.state_names import state_name
from pipework.runtime.stage.layer_errors import layer_text
from pipework.values.dtensor import is_dtensor, local_part, with_local_part

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable


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


def release_layers(
    layers: Iterable[tuple[str, nn.Module, str]], kept: Collection[nn.Module]
) -> list[tuple[str, str, Tensor]]:
    """Moves layers to the meta device, which frees their memory; afterwards a call or a state dict of them raises.

    Parameters and buffers become new objects, so that another holder of the old ones, such as a second model, is not
    disturbed. A layer without any stays as it is.

    Args:
        layers: for each its name, the layer, and who trains it, for the error's message.
        kept: layers of this process; what they share with the others stays.

    Returns:
        The parameters that the layers had, each with its name and who trains it.

    Example:
        >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> [name for name, _, _ in release_layers([("1", second, "rank 1")], [first])]
        ['1.weight', '1.bias']
        >>> first.weight.device.type, second.weight.device.type
        ('cpu', 'meta')
    """
    own = {id(tensor) for layer in kept for tensor in (*layer.parameters(), *layer.buffers())}
    own_modules = {id(module) for layer in kept for module in layer.modules()}
    before: list[tuple[str, str, Tensor]] = []

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
        for path, parameter in layer.named_parameters():
            if id(parameter) not in own:
                parameter.grad = None
                before.append((state_name({name: layer}, f"{name}.{path}"), owner, parameter))
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
    return before


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


def refuse_optimizers_of_others(pipe: object, others: Iterable[tuple[str, str, Tensor]]) -> None:
    """While the pipe lives: refuses the first step of an optimizer that was not made of the pipe's own parameters.

    Such an optimizer trains this process's layers, and would fail only when it is saved.

    Args:
        pipe: an object that lives as long as the pipe, and is not kept.
        others: what `release_layers` returned. What the layers have instead says so itself, see `released_from`.
    """
    known = {id(tensor): (weakref.ref(tensor), name, owner) for name, owner, tensor in others}
    seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # its number of groups

    def elsewhere(parameter: Tensor) -> tuple[str, str] | None:
        reference, name, owner = known.get(id(parameter), (None, "", ""))
        if reference is None or reference() is not parameter:
            return released_from(parameter)
        # The pipe left it without a gradient. One that has got a gradient since is of another model in this process.
        return (name, owner) if parameter.grad is None else None

    def check(optimizer: Optimizer, *_: Any) -> None:
        if seen.get(optimizer) == len(optimizer.param_groups):
            return
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found = [each for parameter in given if (each := elsewhere(parameter)) is not None]
        if found:
            names = ", ".join(name for name, _ in found[:3]) + (", ..." if len(found) > 3 else "")
            owners = ", ".join(sorted({owner for _, owner in found}))
            raise RuntimeError(
                f"the optimizer ({type(optimizer).__name__}) has {len(found)} parameters of layers that are in other "
                f"processes ({owners}): {names}. It would not train them, and could not be saved: make it after "
                f"the pipe, of the pipe's parameters: {type(optimizer).__name__}(pipe.parameters(), ...)"
            )
        seen[optimizer] = len(optimizer.param_groups)

    weakref.finalize(pipe, register_optimizer_step_pre_hook(check).remove)


def refuse_partial_clipping(pipe: object, layers: Callable[[], Iterable[nn.Module]]) -> None:
    """While the pipe lives: `nn.utils.clip_grad_norm_` refuses parameters of several of its layers here, or of all.

    A norm of one parameter alone, or of one layer among several, is the same in any number of processes.

    Args:
        pipe: an object that lives as long as the pipe, and is not kept.
        layers: returns the layers of this process at the time of a call.
    """

    def check(clipped: Iterable[Any]) -> None:
        given = {id(parameter) for parameter in clipped}
        own_layers = [{id(parameter) for parameter in layer.parameters()} for layer in layers()]
        own = set().union(*own_layers)
        alone = len(given) == 1 or any(given <= layer for layer in own_layers if layer != own)
        if not alone and not given.isdisjoint(own):
            raise RuntimeError(
                "nn.utils.clip_grad_norm_ was given parameters of a pipe whose other stages are in other processes: it "
                "would take the norm of this process's gradients only, and scale each stage by another factor. Call "
                "pipe.clip_grad_norm_(max_norm) on all ranks, which takes the norm of all gradients. For a norm of "
                "these alone there are nn.utils.get_total_norm and nn.utils.clip_grads_with_norm_"
            )

    weakref.finalize(pipe, torch_private.before_clip_grad_norm(check))
