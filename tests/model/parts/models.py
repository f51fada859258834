"""Modules as people write them: each has a forward of its own, and computes its loss itself if it gets `labels`."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.inner(self.norm(x)))
        return x + self.drop(y if mask is None else y * mask)


class Chain(nn.Module):
    """Blocks one after the other; what is made of the last one's output is up to a subclass."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(output: Tensor, labels: Tensor | None) -> Any:
    return output if labels is None else {"loss": functional.mse_loss(output, labels), "output": output}


class Plain(nn.Module):
    """Blocks in a list; the glue adds what a block gives."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.scale = 0.5

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for block in self.blocks:
            x = x + self.scale * torch.relu(block(x))
        return loss_of(x, labels)


class UNet(abc.ABC, nn.Module):
    """Skips stay in the forward, which concatenates them. Another class stands before `nn.Module`."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(2, 2, 3, padding=1) for _ in range(3))
        self.middle = nn.Conv1d(2, 2, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv1d(4, 2, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        skips = []
        for down in self.down:
            x = torch.relu(down(x))
            skips.append(x)
        x = self.middle(x)
        for up in self.up:
            x = torch.relu(up(torch.cat([x, skips.pop()], 1)))
        return loss_of(x, labels)


class Residual(abc.ABC, nn.Module):
    """A block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = None
        if stride != 1:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        return self.act(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    """Named like those of timm: stem, layers of several blocks, pooling, head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.act1 = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(4, 4, 1), Residual(4, 4, 1))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8, 1))
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 3)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        return self.layer2(self.layer1(x))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.fc(self.global_pool(self.forward_features(x)).flatten(1))
        return logits if labels is None else functional.cross_entropy(logits, labels)


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.cross = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, *, causal: Tensor) -> Tensor:
        scores = self.own(x) @ self.cross(memory).transpose(-1, -2)
        return x + torch.softmax(scores.masked_fill(causal, -1e9), -1) @ memory


class EncoderDecoder(nn.Module):
    """Every block of the decoder reads what the encoder gave."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, decoder_ids: Tensor, labels: Tensor | None = None) -> Any:
        memory = self.shared(ids)
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(decoder_ids)
        causal = torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool).triu(1)
        for block in self.decoder:
            x = block(x, memory, causal=causal)
        logits = functional.linear(self.norm(x), self.shared.weight)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Vision(nn.Module):
    """A class token and positions are parameters of the root, and a mask is one of its buffers."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.drop = nn.Dropout(p)
        self.blocks = nn.ModuleList(Block(p=p) for _ in range(3))
        self.register_buffer("keep", torch.rand(5, 1))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Any:
        x = self.patch(pixels)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.positions
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, mask=self.keep)
        logits = self.head(self.norm(x)[:, 0])
        return logits if labels is None else (functional.cross_entropy(logits, labels), logits)


class Lists(nn.Module):
    """Blocks in lists of lists; the glue changes in place what a block gave."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(3))

    def forward(self, x: Tensor, factor: float = 2.0, name: str = "relu", labels: Tensor | None = None) -> Any:
        for stage in self.stages:
            for block in stage:
                y = block(x)
                y *= factor
                x = getattr(torch, name)(y) + x
        return loss_of(x, labels)


class InputNorm(nn.Module):
    """A batch norm without parameters, on inputs that need no gradient; a block without parameters counts."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen += 1
            return x * 2

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.counter = InputNorm.Counter()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = self.norm(self.counter(x))
        for block in self.blocks:
            x = block(x)
        return loss_of(x, labels)


class Changing(nn.Module):
    """The forward changes its input and a label in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x -= 0.25
        first = x
        for block in self.blocks:
            x = torch.tanh(block(x)) + first
        if labels is not None:
            labels *= 0.5
        return loss_of(x, labels)


class Frozen(Plain):
    """The first two blocks are not trained."""

    def __init__(self) -> None:
        super().__init__(5)
        for block in self.blocks[:2]:
            block.requires_grad_(False)


class Deep(nn.Module):
    """Units of several sizes, one without parameters, and a mask that all blocks read."""

    def __init__(self, blocks: int = 13) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.squash = nn.Tanh()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        keep = None if mask is None else mask.to(x.dtype)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, keep)
        return loss_of(self.head(self.norm(self.squash(x))), labels)


class Typed(nn.Module):
    """Glue asks units for their class, truth, length and attributes."""

    class Wide(nn.Linear):
        factor = 1.0

        def __init__(self, factor: float) -> None:
            super().__init__(WIDTH, WIDTH)
            self.factor = factor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [Typed.Wide(2.0), nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH)), Typed.Wide(3.0)]
        )
        self.empty = nn.Sequential()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        kept = []
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, Typed.Wide):
                x = x * layer.factor
                kept.append(x)
            elif layer and next(layer.parameters()).dtype is torch.float32:
                x = torch.tanh(x)
        if self.empty:
            x = x * 7
        return loss_of(x + sum(kept) / len(kept), labels)


def batch_of(kind: type[nn.Module], rows: int = 8) -> dict[str, Any]:
    """A mini-batch for a model of a class."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator)

    def tokens(length: int) -> Tensor:
        return torch.randint(0, 11, (rows, length), generator=generator)

    def classes() -> Tensor:
        return torch.randint(0, 3, (rows,), generator=generator)

    batches: dict[type[nn.Module], Callable[[], dict[str, Any]]] = {
        UNet: lambda: {"x": normal(2, 12), "labels": normal(2, 12)},
        ResNet: lambda: {"x": normal(3, 12, 12), "labels": classes()},
        EncoderDecoder: lambda: {"ids": tokens(4), "decoder_ids": tokens(4), "labels": tokens(4)},
        Vision: lambda: {"pixels": normal(4, 4), "labels": classes()},
        Lists: lambda: {"x": normal(WIDTH), "factor": 1.5, "name": "tanh", "labels": normal(WIDTH)},
    }
    return batches.get(kind, lambda: {"x": normal(WIDTH), "labels": normal(WIDTH)})()


MODELS: tuple[type[nn.Module], ...] = (
    Plain, UNet, ResNet, EncoderDecoder, Vision, Lists, InputNorm, Changing, Frozen, Typed,
)  # fmt: skip
