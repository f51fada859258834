"""Gradients that share memory, which are taken apart before others are added to them.

If a gradient comes to a leaf through views alone, PyTorch makes it the leaf's `.grad` without a copy, although another
tensor may have its memory (https://github.com/pytorch/pytorch/issues/34082). After

    x + (rows.unsqueeze(0) + columns.unsqueeze(0))

`rows.grad` and `columns.grad` are one memory, and the gradients of the next micro-batch would be added twice. It may
also be what this stage sends to another one, has received, or keeps for a `W`, or what a user's hook has kept: they
would see the sums. So the first gradient of each leaf is copied if anything else holds its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework import torch_private
from pipework.values.dtensor import local_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class SharedMemory:
    """The memory of the gradients of some leaves, in one mini-batch.

    Args:
        leaves: that have no gradient yet.

    Attributes:
        pending: those of them that have had no gradient so far. Once there is one, PyTorch adds to it in place.

    Example:
        >>> import torch
        >>> rows, columns = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        >>> memory = SharedMemory([rows, columns])
        >>> for micro_batch in range(2):
        ...     (rows.unsqueeze(0) + columns.unsqueeze(0)).sum().backward()
        ...     memory.separate()
        >>> rows.grad, columns.grad
        (tensor([2., 2., 2.]), tensor([2., 2., 2.]))
    """

    __slots__ = ("pending",)

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.pending = leaves

    def separate(self) -> None:
        """After a backward, while the caller has what it began with and what it gave to other tensors.

        Each `.grad` must be a tensor of its own, as autograd makes it: what is counted are the tensors of a memory.
        """
        still_pending = []
        for leaf in self.pending:
            if leaf.grad is None:
                still_pending.append(leaf)
            elif torch_private.is_held_elsewhere(local_part(leaf.grad)):
                leaf.grad = leaf.grad.clone()
        self.pending = still_pending
