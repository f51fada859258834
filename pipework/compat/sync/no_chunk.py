"""`NoChunk` as it was: for tensors only."""

from __future__ import annotations

from torch import Tensor

from pipework.model import marks


class NoChunk(marks.NoChunk):
    """An input tensor that every micro-batch gets whole; see `pipework.NoChunk`.

    Args:
        inp: the tensor.

    Raises:
        TypeError: the argument is not a tensor.
    """

    def __init__(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise TypeError(f"NoChunk only supported for tensors: got {type(inp).__name__}")
        super().__init__(inp)
