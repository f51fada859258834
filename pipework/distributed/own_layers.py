"""Refuses what would silently work with the layers of one process alone, of a pipe in several processes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pipework import torch_private
from pipework.model.release import released_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn


def refuse_optimizers_of_others(pipe: object, others: Iterable[tuple[str, str, Tensor]]) -> None:
    """While the pipe lives: refuses the first step of an optimizer that was not made of the pipe's own parameters.

    Such an optimizer trains this process's layers, and would fail only when it is saved.

    Args:
        pipe: an object that lives as long as the pipe, and is not kept.
        others: parameters that layers in other processes had before these gave them up, each with its name and who
            trains the layer. What they have instead says so itself, see `released_from`.
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
