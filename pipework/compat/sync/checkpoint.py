"""Checkpointing of one function, and which of its two runs this is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipework.compat.checkpoints import checkpointed
from pipework.model.checkpoint import is_checkpointing, is_recomputing

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["checkpoint", "is_checkpointing", "is_recomputing"]


def checkpoint(function: Callable[..., Any], input: Any) -> Any:
    """Runs a function without a graph, and once more when gradients are wanted.

    Args:
        function: of the input; the values of a tuple are its arguments.
        input: a tensor, or a tuple of values.

    Example:
        >>> import torch
        >>> checkpoint(torch.add, (torch.ones(1), torch.ones(1))).item()
        2.0
    """
    return checkpointed(function, input)
