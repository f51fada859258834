"""A U-Net whose long skips go through a pipe's own skip connections: pipework's, or those of a library like it.

    level 0   conv conv --------------------------------------- skip --> cat conv conv   1x1
    level 1      down   conv conv --------------- skip --> cat conv conv   up
    bottom                 down   conv   ...   conv   up

Each convolution, norm and activation is a layer of its own, so that a balance can cut anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NORMS = ("batch", "group")


@dataclass(frozen=True)
class UNet:
    """The shape of a U-Net.

    Attributes:
        levels: how often the resolution is halved, which is also the number of long skips.
        width: channels of the finest level; each coarser one has twice as many.
        convolutions: in a block; each level has a block on either side of the bottom.
        norm: 'batch' (its statistics are those of the micro-batch) or 'group' (rows do not see each other).
        channels: of the input and of the output.
    """

    levels: int = 3
    width: int = 16
    convolutions: int = 2
    norm: str = "batch"
    channels: int = 3

    def build(self, library: Any) -> nn.Sequential:
        """The model, with the same values each time.

        Args:
            library: a module that has `skippable`, `stash`, `pop` and `Namespace`, such as `pipework.skip`.
        """
        torch.manual_seed(0)
        return nn.Sequential(*self._layers(library))

    def _layers(self, library: Any) -> Iterator[nn.Module]:
        keep, join = skip_layers(library)
        skips = [library.Namespace() for _ in range(self.levels)]
        widths = [self.width << level for level in range(self.levels + 1)]
        before = self.channels
        for skip, width in zip(skips, widths, strict=False):
            yield from self._block(before, width)
            yield keep().isolate(skip)
            yield nn.MaxPool2d(2)
            before = width
        yield from self._block(before, widths[-1])
        for skip, width in zip(skips[::-1], widths[-2::-1], strict=True):
            yield nn.ConvTranspose2d(2 * width, width, kernel_size=2, stride=2)
            yield join().isolate(skip)
            yield from self._block(2 * width, width)
        yield nn.Conv2d(self.width, self.channels, kernel_size=1)

    def _block(self, before: int, width: int) -> Iterator[nn.Module]:
        for number in range(self.convolutions):
            yield nn.Conv2d(width if number else before, width, kernel_size=3, padding=1, bias=False)
            yield nn.BatchNorm2d(width) if self.norm == "batch" else nn.GroupNorm(4, width)
            yield nn.ReLU()


def skip_layers(library: Any) -> tuple[Any, Any]:
    """The two ends of a long skip: a layer that stashes what it gets, and one that appends it to what it gets."""

    @library.skippable(stash=["features"])
    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield library.stash("features", x)
            return x

    @library.skippable(pop=["features"])
    class Join(nn.Module):
        def forward(self, x: Tensor) -> Any:
            features = yield library.pop("features")
            return torch.cat([features, x], dim=1)

    return Keep, Join
