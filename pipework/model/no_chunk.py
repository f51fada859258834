"""The mark of a tensor that is not split."""

from __future__ import annotations

from torch import Tensor


class NoChunk:
    """An input tensor that every micro-batch gets whole, such as a mask of shape (1, 1, tokens, tokens).

    If it requires a gradient, it gets the sum over the micro-batches.

    Args:
        tensor: the tensor.

    Raises:
        TypeError: the argument is not a tensor.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> pipe = Pipe(nn.Sequential(nn.Bilinear(2, 2, 3), nn.Tanh()), chunks=2, balance=[1, 1], devices=["cpu"] * 2)
        >>> pipe(torch.ones(4, 2), NoChunk(torch.ones(2, 2))).shape
        torch.Size([4, 3])
    """

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"NoChunk only supported for tensors: got {type(tensor).__name__}")
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"NoChunk({self.tensor!r})"
