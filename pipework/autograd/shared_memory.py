"""Gradients that share memory, which are taken apart before others are added to them.

If a gradient comes to a leaf through views alone, PyTorch makes it the leaf's `.grad` without a copy, although another
tensor may have its memory (https://github.com/pytorch/pytorch/issues/34082). After

    x + (rows.unsqueeze(0) + columns.unsqueeze(0))

`rows.grad` and `columns.grad` are one memory, and the gradients of the next micro-batch would be added twice. It may
also be what this stage sends to another one, has received, or keeps for a `W`, or what a user's hook has kept: they
would see the sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework import torch_private
from pipework.values.dtensor import local_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
        ...     memory.separate(())
        >>> rows.grad, columns.grad
        (tensor([2., 2., 2.]), tensor([2., 2., 2.]))
    """

    __slots__ = ("_taken", "pending")

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.pending = leaves
        self._taken: set[int] = set()

    def separate(self, others: Iterable[Tensor | None]) -> None:
        """After a backward: gives each new gradient memory of its own.

        Args:
            others: gradients with which this backward began, or which it gave to other tensors.
        """
        new = [leaf for leaf in self.pending if leaf.grad is not None]
        if not new:
            return
        self.pending = [leaf for leaf in self.pending if leaf.grad is None]
        taken = self._taken | {_key(other) for other in others if other is not None}
        for leaf in new:
            gradient = leaf.grad
            assert gradient is not None
            key = _key(gradient)
            if key is not None and (key in taken or torch_private.is_held_elsewhere(local_part(gradient))):
                leaf.grad = gradient.clone()
            elif key is not None:
                taken.add(key)
                self._taken.add(key)


def _key(gradient: Tensor) -> int | None:
    return torch_private.memory_key(local_part(gradient))
