"""`checkpoint` of `torch.distributed.pipeline.sync`, which runs one function checkpointed, without a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import checkpoint as of_torch

from pipework.runtime.stage.recompute_phase import checkpointing, recomputing

if TYPE_CHECKING:
    from collections.abc import Callable


def checkpoint(function: Callable[..., Any], input: Any) -> Any:
    """Runs a function without a graph, and once more when gradients are wanted.

    `is_checkpointing()` and `is_recomputing()` show it which of the two runs this is. Both draw the same random
    numbers.

    Args:
        function: of the input; the values of a tuple are its arguments.
        input: a tensor, or a tuple of values.

    Example:
        >>> from pipework import is_recomputing
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = checkpoint(lambda x, y: (print("again" if is_recomputing() else "once"), x * y)[1], (x, 2))
        once
        >>> y.sum().backward()
        again
    """
    inputs = (input,) if isinstance(input, Tensor) else tuple(input)

    def run(differentiable: Tensor, *inputs: Any) -> Any:
        # The second of the two runs has a graph.
        with recomputing() if torch.is_grad_enabled() else checkpointing():
            return function(*inputs)

    # Parameters may require a gradient where no input does.
    return of_torch.checkpoint(run, torch.empty(0, requires_grad=True), *inputs, use_reentrant=True)
