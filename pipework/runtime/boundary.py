"""Where the autograd graph is cut: a value that arrives becomes a leaf, and the stage sees an alias of that leaf.

    sender                                 receiver
    ... -> y                               leaf (its .grad is what goes back) -> [Enter] -> alias -> first layer ...
           |                                ^
           +-- y.detach().requires_grad_() -+   the same memory, the same version counter, no graph

The alias is there because a leaf refuses in-place operations. Which layer comes first in a stage depends on the
balance, and an in-place layer (nn.ReLU(inplace=True)) must behave as in the un-partitioned model: allowed where
PyTorch allows it, PyTorch's own error where the sender saved the tensor for its backward, because both share one
version counter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Enter(torch.autograd.Function):
    """Identity that returns an alias of its input, not a view: in-place operations are allowed on it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Returns the alias; it shares memory and version counter with the leaf."""
        return leaf.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Passes the gradient on untouched."""
        return gradient


def cut(tensor: Tensor) -> Tensor:
    """The tensor without its graph: a leaf that requires a gradient exactly if the tensor did.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> leaf = cut(weight * 2)
        >>> leaf.is_leaf, leaf.requires_grad, cut(torch.ones(2)).requires_grad
        (True, True, False)
    """
    leaf = tensor.detach()
    return leaf.requires_grad_() if tensor.requires_grad else leaf


def enter(leaf: Tensor) -> Tensor:
    """What the stage's first layer gets in place of the leaf."""
    return Enter.apply(leaf) if leaf.requires_grad else leaf  # type: ignore[no-untyped-call]
