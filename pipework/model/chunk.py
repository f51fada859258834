"""How a value among the arguments of a pipe is cut into micro-batches: `Chunk` and `NoChunk` say it."""

from __future__ import annotations

from typing import Any


class NoChunk:
    """A value that every micro-batch gets whole, such as a mask of shape (1, 1, tokens, tokens).

    A tensor in it that requires a gradient gets the sum over the micro-batches.

    Args:
        value: a tensor, a container of tensors, or any object.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> pipe = Pipe(nn.Sequential(nn.Bilinear(2, 2, 3), nn.Tanh()), chunks=2, balance=[1, 1], devices=["cpu"] * 2)
        >>> pipe(torch.ones(4, 2), NoChunk(torch.ones(2, 2))).shape
        torch.Size([4, 3])
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"NoChunk({self.value!r})"


class Chunk:
    """A value whose tensors have the rows of the batch along a dimension that need not be the first.

    Args:
        value: a tensor, or a container of tensors.
        dim: the dimension of the rows, in each of the tensors; negative ones count from the last.

    Raises:
        TypeError: `dim` is no integer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> class Rotated(nn.Module):
        ...     def forward(self, x, positions):  # of shapes [rows, width] and [3, rows]
        ...         return x + positions.sum(0)[:, None]
        >>> pipe = Pipe(nn.Sequential(Rotated(), nn.Tanh()), chunks=2, balance=[1, 1], devices=["cpu"] * 2)
        >>> pipe(torch.ones(4, 2), Chunk(torch.ones(3, 4), dim=1)).shape
        torch.Size([4, 2])
    """

    def __init__(self, value: Any, dim: int = 0) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"Chunk got dim={dim!r}: wanted the number of the dimension that has the rows")
        self.value = value
        self.dim = dim

    def __repr__(self) -> str:
        return f"Chunk({self.value!r}, dim={self.dim})"
