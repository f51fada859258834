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


class OptimizerCheck:
    """Refuses the first step of an optimizer that was not made of the pipe's own parameters, while it is open.

    Such an optimizer trains this process's layers, and is refused only when it is saved.

    Args:
        others: parameters that layers in other processes had before these gave them up, each with its name and who
            trains the layer. What they have instead says so itself, see `released_from`.
    """

    def __init__(self, others: Iterable[tuple[str, str, Tensor]]) -> None:
        self._others = {id(tensor): (weakref.ref(tensor), name, owner) for name, owner, tensor in others}
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # its number of groups
        check = weakref.WeakMethod(self._check)

        def hook(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
            if (method := check()) is not None:  # the hook must not keep a pipe that nobody uses
                method(optimizer)

        self._hook = register_optimizer_step_pre_hook(hook)
        weakref.finalize(self, self._hook.remove)

    def _check(self, optimizer: Optimizer) -> None:
        if self._seen.get(optimizer) == len(optimizer.param_groups):
            return
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found = [each for parameter in given if (each := self._elsewhere(parameter)) is not None]
        if found:
            names = ", ".join(name for name, _ in found[:3]) + (", ..." if len(found) > 3 else "")
            owners = ", ".join(sorted({owner for _, owner in found}))
            raise RuntimeError(
                f"the optimizer ({type(optimizer).__name__}) has {len(found)} parameters of layers that are in other "
                f"processes ({owners}): {names}. It would not train them, and could not be saved: make it after "
                f"the pipe, of the pipe's parameters: {type(optimizer).__name__}(pipe.parameters(), ...)"
            )
        self._seen[optimizer] = len(optimizer.param_groups)

    def _elsewhere(self, parameter: Tensor) -> tuple[str, str] | None:
        known = self._others.get(id(parameter))
        if known is None or known[0]() is not parameter:
            return released_from(parameter)
        # The pipe left it without a gradient. One that has got a gradient since is of another model in this process.
        return known[1:] if parameter.grad is None else None


class ClipCheck:
    """While it is open, `nn.utils.clip_grad_norm_` raises if it is given parameters of several of these layers, or all.

    A norm of one parameter alone, or of one layer among several, is the same in any number of processes.

    Args:
        layers: returns the layers of this process at the time of a call.
    """

    def __init__(self, layers: Callable[[], Iterable[nn.Module]]) -> None:
        self._layers = layers
        refuse = weakref.WeakMethod(self._refuse)

        def check(clipped: Iterable[Any]) -> None:
            if (method := refuse()) is not None:
                method(clipped)

        weakref.finalize(self, torch_private.before_clip_grad_norm(check))

    def _refuse(self, clipped: Iterable[Any]) -> None:
        given = {id(parameter) for parameter in clipped}
        layers = [{id(parameter) for parameter in layer.parameters()} for layer in self._layers()]
        own = set().union(*layers)
        alone = len(given) == 1 or any(given <= layer for layer in layers if layer != own)
        if not alone and not given.isdisjoint(own):
            raise RuntimeError(
                "nn.utils.clip_grad_norm_ was given parameters of a pipe whose other stages are in other processes: it "
                "would take the norm of this process's gradients only, and scale each stage by another factor. Call "
                "pipe.clip_grad_norm_(max_norm) on all ranks, which takes the norm of all gradients. For a norm of "
                "these alone there are nn.utils.get_total_norm and nn.utils.clip_grads_with_norm_"
            )
