"""Alias leaves: what a worker differentiates with respect to in place of the user's parameters.

    the user's Parameter p           alias = p.detach().requires_grad_()          one per stage and mini-batch
      p.grad, its hooks, DDP           alias.grad: the stage's gradient buffer
            ^                                         |
            +--- one autograd node per stage ---------+   handed over once, when the user's backward() arrives

Workers may run backward before the user calls it, several times per mini-batch and at the same time as each other.
None of that may be seen on the user's parameters: their hooks fire once, with the whole gradient. So for the time of
a run the aliases stand in the modules' slots. They share memory and version counter with the parameters: no copy is
made, and writing to a parameter before a retained backward is PyTorch's error, as it should be.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from pipework.runtime.stage import Layer


class Aliases:
    """The alias leaves of one stage for one mini-batch.

    The slots are read anew each time, so that freezing a layer, unfreezing it or replacing a parameter works between
    two mini-batches.
    """

    __slots__ = ("_slots", "leaves", "parameters")

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        by_parameter: dict[int, tuple[Tensor, Tensor]] = {}
        self._slots: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        for slots in _slot_dicts(layers):
            for name, parameter in slots.items():
                if parameter is not None and parameter.requires_grad:
                    if id(parameter) not in by_parameter:
                        by_parameter[id(parameter)] = (parameter, parameter.detach().requires_grad_())
                    self._slots.append((slots, name, parameter, by_parameter[id(parameter)][1]))
        self.parameters = [parameter for parameter, _ in by_parameter.values()]
        self.leaves = [alias for _, alias in by_parameter.values()]

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """For the time of the context, the modules find the aliases where their parameters were."""
        for slots, name, _, alias in self._slots:
            slots[name] = alias
        try:
            yield
        finally:
            for slots, name, parameter, alias in self._slots:
                if slots.get(name) is alias:  # a layer that replaced its own parameter keeps what it put there
                    slots[name] = parameter

    def named(self, layers: Iterable[Layer]) -> Iterator[tuple[str, Tensor]]:
        """The aliases with the names of their parameters in the un-partitioned module."""
        by_slot = {(id(slots), name): alias for slots, name, _, alias in self._slots}
        for layer in layers:
            for prefix, module in layer.module.named_modules(prefix=layer.name):
                for name in module._parameters:
                    if (id(module._parameters), name) in by_slot:
                        yield f"{prefix}.{name}", by_slot[id(module._parameters), name]

    def take_gradients(self) -> list[Tensor | None]:
        """The gradient of each parameter, None where it got none.

        No reference is kept, so autograd may make these tensors the parameters' `.grad` without a copy.
        """
        gradients = [alias.grad for alias in self.leaves]
        for alias in self.leaves:
            alias.grad = None
        return gradients


def _slot_dicts(layers: Iterable[nn.Module]) -> Iterator[dict[str, Tensor | None]]:
    """The parameter dictionaries of all modules below, each once.

    Faster than `named_parameters`, which builds names that nobody needs here.
    """
    seen: set[int] = set()
    stack = list(layers)[::-1]
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            if module._parameters:
                yield module._parameters  # type: ignore[misc]
            stack.extend(child for child in reversed(module._modules.values()) if child is not None)
