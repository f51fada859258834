"""What a message holds in place of a tensor that no later part reads: its shape, since the glue runs on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from torch import Tensor

_HAVE_NAN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Absent:
    """The form of a tensor without its values.

    Attributes:
        shape: of the tensor.
        dtype: its name, such as "float32".
    """

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The form of a tensor.

        Example:
            >>> Absent.of(torch.ones(2, 3))
            Absent(shape=(2, 3), dtype='float32')
        """
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """The form that `str` has written.

        Example:
            >>> Absent.of_text(str(Absent((2, 3), "float32")))
            Absent(shape=(2, 3), dtype='float32')
        """
        dtype, *shape = text.split()
        return cls(tuple(map(int, shape)), dtype)

    def __str__(self) -> str:
        """The form in short, since a message has many of them."""
        return " ".join([self.dtype, *map(str, self.shape)])

    def tensor(self, device: torch.device) -> Tensor:
        """A tensor of this form that takes the memory of one element.

        It is NaN where there is one, so that a part that reads it although it should not does not go unnoticed.
        """
        dtype = getattr(torch, self.dtype)
        return torch.full((), math.nan if dtype in _HAVE_NAN else 0, dtype=dtype, device=device).expand(self.shape)
