"""Finds an optimizer that has parameters of layers in other processes, at its first step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class OptimizerCheck:
    """Refuses the first step of an optimizer that was not made of the pipe's own parameters, while it is open.

    Such an optimizer trains this process's layers, and is refused only when it is saved.

    Args:
        others: parameters of layers in other processes, each with its name and the rank that trains it.
    """

    def __init__(self, others: Iterable[tuple[str, int, Tensor]]) -> None:
        self._others = {id(tensor): (weakref.ref(tensor), name, rank) for name, rank, tensor in others}
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        check = weakref.WeakMethod(self._check)

        def hook(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
            if (method := check()) is not None:  # the hook must not keep a pipe that nobody uses
                method(optimizer)

        self._hook = register_optimizer_step_pre_hook(hook)
        weakref.finalize(self, self._hook.remove)

    def _check(self, optimizer: Optimizer) -> None:
        if optimizer in self._seen:
            return
        found = [
            other[1:]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (other := self._others.get(id(parameter))) is not None and other[0]() is parameter
        ]
        if found:
            names = ", ".join(name for name, _ in found[:3]) + (", ..." if len(found) > 3 else "")
            ranks = ", ".join(map(str, sorted({rank for _, rank in found})))
            raise RuntimeError(
                f"the optimizer ({type(optimizer).__name__}) has {len(found)} parameters of layers that are in other "
                f"processes (rank {ranks}): {names}. It would not train them, and could not be saved: make it after "
                f"the pipe, of the pipe's parameters: {type(optimizer).__name__}(pipe.parameters(), ...)"
            )
        self._seen.add(optimizer)
