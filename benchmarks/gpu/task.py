"""What is trained: blocks of a GPT of some size, and a Llama of transformers, each with its mini-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.card import Card


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention, then the inner layers, each beside what it is given."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        inner: Tensor = x + self.inner(self.between(x))
        return inner


@dataclass(frozen=True)
class Task:
    """Equal blocks.

    Attributes:
        width: of the model.
        blocks: how many.
        chunks: micro-batches of a mini-batch.
        rows: of a micro-batch.
        tokens: of a row.
    """

    width: int
    blocks: int
    chunks: int
    rows: int
    tokens: int

    @property
    def mini_batch_tokens(self) -> int:
        """Of all micro-batches."""
        return self.chunks * self.rows * self.tokens

    def flops(self) -> float:
        """Of a training step: see `training_flops`."""
        return training_flops(12 * self.width**2 * self.blocks, self.blocks, self.width, self.tokens) * (
            self.mini_batch_tokens
        )

    def model(self, card: Card) -> nn.Sequential:
        """The same values each time."""
        torch.manual_seed(0)
        with card.device:
            blocks = [Block(self.width, max(1, self.width // 64)) for _ in range(self.blocks)]
            return nn.Sequential(*blocks).to(card.dtype)

    def batch(self, card: Card, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """A mini-batch and its target.

        Args:
            card: on which.
            tokens: of a row; None: all.
        """
        draw = torch.Generator(card.device).manual_seed(1)
        shape = (self.chunks * self.rows, tokens or self.tokens, self.width)
        x, y = (torch.randn(shape, generator=draw, device=card.device, dtype=card.dtype) for _ in range(2))
        return x, y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean square of the difference."""
    return F.mse_loss(output.float(), target.float())


def training_flops(multiplied: int, blocks: int, width: int, tokens: int) -> float:
    """FLOPs of forward and backward for each token: 6 for each weight that multiplies, 12 x width x tokens a block.

    The latter are attention's, all pairs of tokens counted, as usual (PaLM, appendix B).

    Args:
        multiplied: the number of weights in matrix products.
        blocks: with attention.
        width: of all heads together.
        tokens: of a row.
    """
    return 6.0 * multiplied + 12.0 * blocks * width * tokens
