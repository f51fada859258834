"""Five models whose layers differ: in kind, in time, in parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipework.skip
from benchmarks.unet import UNet


@dataclass(frozen=True)
class Task:
    """A model and a mini-batch."""

    module: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.between = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the inner layers, each beside what it is given."""
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.inner(self.between(x))


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.beside = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block beside a convolution of one pixel."""
        return F.relu(self.inner(x) + self.beside(x))


class Recurrent(nn.Module):
    """A GRU, without its last state."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.inner = nn.GRU(before, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all steps."""
        return self.inner(x)[0]


def transformer() -> nn.Sequential:
    """An embedding, six blocks, and a head that takes longer than a block."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 6000))
    return nn.Sequential(nn.Embedding(6000, 192), *(Block(192) for _ in range(6)), head)


def residual() -> nn.Sequential:
    """A stem, eight blocks of four widths, and a classifier."""
    torch.manual_seed(0)
    widths = [24, 24, 48, 48, 96, 96, 192, 192]
    blocks = [
        Residual(before, width, 1 if before == width else 2)
        for before, width in zip([24, *widths], widths, strict=False)
    ]
    stem = nn.Sequential(nn.Conv2d(3, 24, 3, 1, 1), nn.ReLU())
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 100))


def unequal() -> nn.Sequential:
    """Linear layers of very different sizes."""
    torch.manual_seed(0)
    widths = [256, 2048, 256, 256, 1024, 512, 2048, 1536, 128, 128, 10]
    layers: list[nn.Module] = []
    for before, width in pairwise(widths):
        layers += [nn.Linear(before, width), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def recurrent() -> nn.Sequential:
    """Five GRUs, and a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(*(Recurrent(128, 128) for _ in range(5)), nn.Linear(128, 32))


def _tokens(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 6000, (rows, 64)), torch.randint(0, 6000, (rows, 64))


def _of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


TASKS = {
    "transformer": Task(transformer, lambda: _tokens(16), _of_tokens),
    "U-Net": Task(
        lambda: UNet(levels=3, width=16, norm="group").build(pipework.skip),
        lambda: (torch.randn(16, 3, 64, 64), torch.randn(16, 3, 64, 64)),
        F.mse_loss,
    ),
    "residual": Task(residual, lambda: (torch.randn(32, 3, 32, 32), torch.randint(0, 100, (32,))), F.cross_entropy),
    "unequal": Task(unequal, lambda: (torch.randn(512, 256), torch.randint(0, 10, (512,))), F.cross_entropy),
    "GRU": Task(recurrent, lambda: (torch.randn(32, 24, 128), torch.randn(32, 24, 32)), F.mse_loss),
}
