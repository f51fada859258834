"""The models of `p2p_overhead`: equal blocks, from tiny to large, one half of them on each process."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from benchmarks.feed_forward import FeedForward
from benchmarks.two_processes import WORKERS


@dataclass(frozen=True)
class Size:
    """How much there is to compute, and to send.

    Attributes:
        blocks: of both processes together; 0: each has a single linear layer.
        width: of the model.
        rows: of a micro-batch.
    """

    blocks: int
    width: int
    rows: int

    @property
    def sent_bytes(self) -> int:
        """By each forward and each backward."""
        return 4 * self.rows * self.width

    def __str__(self) -> str:
        count = self.blocks // WORKERS
        layers = f"{count} feed-forward block{'' if count == 1 else 's'}" if count else "a linear layer"
        return f"{layers} of width {self.width}, {self.rows} rows, {self.sent_bytes / 1024:.3g} KiB"


SIZES = MappingProxyType({"tiny": Size(0, 32, 4), "small": Size(2, 128, 128), "large": Size(4, 256, 2048)})


@dataclass(frozen=True)
class Task:
    """A model of some size, and a mini-batch for it."""

    size: Size
    chunks: int

    def model(self) -> nn.Sequential:
        """The same model, with the same values, in every process."""
        torch.manual_seed(0)
        width = self.size.width
        if self.size.blocks:
            return nn.Sequential(*(FeedForward(width) for _ in range(self.size.blocks)))
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(WORKERS)))

    def batch(self) -> tuple[Tensor, Tensor]:
        """The same mini-batch and target, in every process."""
        shape = (self.size.rows * self.chunks, self.size.width)
        generator = torch.Generator().manual_seed(1)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def loss_of(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean square of the difference."""
        return nn.functional.mse_loss(output, target)

    def balance(self, schedule: str) -> list[int]:
        """A half on each process."""
        return [max(1, self.size.blocks // WORKERS)] * WORKERS

    def placement(self, schedule: str) -> tuple[int, ...]:
        """A stage on each process."""
        return tuple(range(WORKERS))
