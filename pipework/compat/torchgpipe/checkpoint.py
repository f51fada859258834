"""Checkpointing of one function, and which of its two runs this is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipework.compat import checkpoints
from pipework.model.checkpoint import is_checkpointing, is_recomputing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["checkpoint", "is_checkpointing", "is_recomputing"]


def checkpoint(function: Callable[[Any], Any], input: Tensor | tuple[Tensor, ...]) -> Any:
    """As `pipework.compat.checkpoints.checkpoint`, but a tuple is one argument of the function.

    Example:
        >>> import torch
        >>> checkpoint(sum, (torch.ones(1), torch.ones(1))).item()
        2.0
    """
    return checkpoints.checkpoint(lambda *inputs: function(inputs if isinstance(input, tuple) else inputs[0]), input)
