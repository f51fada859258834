"""Cuts the autograd graph between stages: a received value is a leaf, and the stage reads an alias of that leaf.

    sender                                 receiver
    ... -> y                               leaf (its .grad is what goes back) -> alias -> first layer ...
           |                                ^
           +-- y.detach().requires_grad_() -+   the same memory, no graph

A leaf refuses in-place operations, an alias does not. Which layer comes first in a stage depends on the balance, and an
in-place layer (nn.ReLU(inplace=True)) must behave as in the un-partitioned model: it works where PyTorch allows it, and
raises PyTorch's own error where the sender saved the tensor for its backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from pipework import torch_private

if TYPE_CHECKING:
    from torch import Tensor


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
    """An alias of the leaf for the stage's first layer, which may change it in place.

    A tensor that requires no gradient is returned as it is, and so is one that is not strided (sparse, nested).
    """
    if not leaf.requires_grad or leaf.layout is not torch.strided:
        return leaf
    return torch_private.unsafe_view(leaf, leaf.shape)


def enter_slice(leaf: Tensor) -> Tensor:
    """The same for a slice of the caller's batch.

    All slices of a tensor share a version counter. If one is changed in place, the graphs of the others must not take
    it for a change of theirs.
    """
    if leaf.requires_grad:
        return enter(leaf)
    return leaf if leaf.is_inference() else leaf.data  # a tensor of inference mode has no version counter


def report_overwriting(leaf: Tensor, alias: Tensor) -> bool:
    """After the stage has run: whether it changed its input in place; if so, increments the leaf's version.

    The alias has a version counter of its own. The sender shares the leaf's, and may have saved the tensor.
    """
    if alias is leaf or not torch_private.version(alias):
        return False
    increment_version(leaf)
    return True
