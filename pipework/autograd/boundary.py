"""Where the autograd graph is cut: a value that arrives becomes a leaf, and the stage sees an alias of that leaf.

    sender                                 receiver
    ... -> y                               leaf (its .grad is what goes back) -> alias -> first layer ...
           |                                ^
           +-- y.detach().requires_grad_() -+   the same memory, no graph

The alias is there because a leaf refuses in-place operations. Which layer comes first in a stage depends on the
balance, and an in-place layer (nn.ReLU(inplace=True)) must behave as in the un-partitioned model: allowed where
PyTorch allows it, PyTorch's own error where the sender saved the tensor for its backward.
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
    """What the stage's first layer gets in place of the leaf: an alias, on which in-place operations are allowed.

    A tensor that needs no gradient is its own alias, and so is one that is no plain array of numbers (sparse, nested).
    """
    if not leaf.requires_grad or leaf.layout is not torch.strided:
        return leaf
    return torch_private.unsafe_view(leaf, leaf.shape)


def enter_slice(leaf: Tensor) -> Tensor:
    """The same for a slice of the caller's batch.

    All slices of a tensor count their versions together. If one is overwritten, the others' graphs must not think that
    theirs was.
    """
    if leaf.requires_grad:
        return enter(leaf)
    return leaf if leaf.is_inference() else leaf.data  # a tensor of inference mode counts no versions


def report_overwriting(leaf: Tensor, alias: Tensor) -> bool:
    """After the stage has run: whether it changed its input in place; if so, the sender's version of it is raised.

    The alias counts its versions by itself, but the sender may have saved the tensor and must notice.
    """
    if alias is leaf or not torch_private.version(alias):
        return False
    increment_version(leaf)
    return True
