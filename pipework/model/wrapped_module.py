"""The module that a pipe was made of: what a program changes in it afterwards does not reach the pipe."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from pipework import torch_private

if TYPE_CHECKING:
    from torch import nn


class WrappedModule:
    """Looks whether the module still has the layers that it had, and nothing that a pipe of them leaves out.

    Args:
        module: whose layers a pipe has just taken; None: there is none.

    Example:
        >>> from torch import nn
        >>> module = nn.Sequential(nn.Linear(2, 2))
        >>> wrapped = WrappedModule(module)
        >>> wrapped.doubts()
        []
        >>> module[0] = nn.Linear(2, 3)
        >>> [len(wrapped.doubts()) for _ in range(2)]  # once
        [1, 0]
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._layers = [] if module is None else [*module._modules.values()]
        self._was_compiled = module is not None and torch_private.is_compiled(module)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a pipe has copies of the layers, and the module has none."""
        return WrappedModule, ()

    def doubts(self) -> list[str]:
        """What there is to be warned of, once."""
        module = None if self._module is None else self._module()
        if module is None:
            self._layers = []  # the module does not keep them any more
            return []
        kind = type(module).__name__
        if self._layers != [*module._modules.values()]:
            text = (
                f"the {kind} that this pipe was made of has other layers now; the pipe, its parameters() and its "
                "state_dict() keep those that it was made of. Replace a layer in the pipe, pipe[index] = layer, before "
                "the optimizer is made, or make a new Pipe"
            )
        elif torch_private.has_hooks(module):
            text = (
                f"the {kind} that this pipe was made of has hooks, which are not called, since the pipe calls its "
                "layers one by one: register them on the pipe, or on a layer"
            )
        elif torch_private.is_compiled(module) and not self._was_compiled:
            text = (
                f"{kind}.compile() was called on the module that this pipe was made of, which the pipe does not call: "
                "compile its layers, pipe.compile()"
            )
        else:
            return []
        self._module = None
        return [text]
