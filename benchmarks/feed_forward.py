"""The feed-forward half of a transformer's block, for benchmarks that need equal blocks and nothing else."""

from __future__ import annotations

from torch import Tensor, nn


class FeedForward(nn.Module):
    """Layer norm, two linear layers with a GELU between them, a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
