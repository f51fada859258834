"""Finds an optimizer that has parameters of layers in other processes, at its first step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pipework.model.release import released_from

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


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
