"""`checkpoint` of the old libraries, which runs one function checkpointed, without a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import checkpoint as of_torch

from pipework.runtime.stage.recompute_phase import checkpointing, recomputing

if TYPE_CHECKING:
    from collections.abc import Callable


def checkpoint(function: Callable[[Any], Any], input: Tensor | tuple[Tensor, ...]) -> Any:
    """Runs a function without a graph, and once more when gradients are wanted.

    `is_checkpointing()` and `is_recomputing()` show it which of the two runs this is. Both draw the same random
    numbers.

    Args:
        function: of the input; a tuple is one argument.
        input: a tensor or several.

    Example:
        >>> from pipework import is_recomputing
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = checkpoint(lambda x: (print("again" if is_recomputing() else "once"), 2 * x)[1], x)
        once
        >>> y.sum().backward()
        again
    """
    return checkpointed(lambda *tensors: function(tensors if isinstance(input, tuple) else tensors[0]), input)


def checkpointed(function: Callable[..., Any], input: Any) -> Any:
    """As `checkpoint`; a tuple becomes the function's arguments.

    Example:
        >>> checkpointed(torch.add, (torch.ones(1), torch.ones(1))).item()
        2.0
    """
    inputs = (input,) if isinstance(input, Tensor) else tuple(input)

    def run(differentiable: Tensor, *inputs: Any) -> Any:
        # The second of the two runs has a graph.
        with recomputing() if torch.is_grad_enabled() else checkpointing():
            return function(*inputs)

    # Parameters may require a gradient where no input does.
    return of_torch.checkpoint(run, torch.empty(0, requires_grad=True), *inputs, use_reentrant=True)
