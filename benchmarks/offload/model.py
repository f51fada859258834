"""A Llama with adapters (LoRA) as layers in a row, for the meta device: shapes and operations, and no values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import register_flop_formula

PIECE = 1024  # tokens for which the head has logits at a time


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama.

    Attributes:
        name: for tables.
        width: of a token between blocks.
        inner: width of the feed-forward part.
        blocks: how many.
        heads: of attention, each with `head` numbers.
        groups: heads of keys and values.
        vocabulary: how many tokens there are.
        rank: of the adapters; None: all weights are trained, and there are no adapters.
        head: numbers of a head.
        bits: of the frozen weights in blocks.
    """

    name: str
    width: int
    inner: int
    blocks: int
    heads: int
    groups: int
    vocabulary: int
    rank: int | None = 16
    head: int = 128
    bits: int = 16

    @property
    def share(self) -> float:
        """The bytes of a block's frozen weights beside those in bfloat16; 4 bits (NF4) have a scale for 64 of them."""
        return 1.0 if self.bits == 16 else (self.bits + 8 / 16) / 16

    def layers(self) -> nn.Sequential:
        """Embedding, blocks and head, in bfloat16 on the meta device."""
        with torch.device("meta"):
            blocks = (Block(self) for _ in range(self.blocks))
            embedding = nn.Embedding(self.vocabulary, self.width)
            model = nn.Sequential(embedding, *blocks, Head(self)).to(torch.bfloat16)
        if self.rank is not None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("adapter" in name)
        return model


LLAMA_8B = Config("Llama-3-8B", 4096, 14336, 32, 32, 8, 128_256)
QWEN_14B = Config("Qwen2.5-14B", 5120, 13824, 48, 40, 8, 152_064)
ALL_TRAINED = replace(LLAMA_8B, name="Llama-3-8B-all-trained", rank=None)
IN_4_BITS = [replace(config, name=f"{config.name}-4bit", bits=4) for config in (LLAMA_8B, QWEN_14B)]


class Linear(nn.Module):
    """A matrix, and beside it two narrow ones that are trained."""

    def __init__(self, width: int, out: int, rank: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))
        shapes = [] if rank is None else [(rank, width), (out, rank)]
        self.adapter = nn.ParameterList(torch.empty(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y + F.linear(F.linear(x, self.adapter[0]), self.adapter[1]) * 2.0 if self.adapter else y


class Norm(nn.Module):
    """Of root mean squares, in float32, with the operators of transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * exact.to(x.dtype)


class Block(nn.Module):
    """Attention and a gated feed-forward part, each beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, head = config.width, config.head
        counts = config.heads, config.groups, config.groups
        self.head = head
        self.norms = nn.ModuleList(Norm(width) for _ in range(2))
        self.given = nn.ModuleList(Linear(width, count * head, config.rank) for count in counts)
        self.out = Linear(config.heads * head, width, config.rank)
        self.gate, self.up = (Linear(width, config.inner, config.rank) for _ in range(2))
        self.down = Linear(config.inner, width, config.rank)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        query, key, value = (part(normed).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in self.given)
        attended = causal_attention(self.turned(query), self.turned(key), value)[0]
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def turned(self, x: Tensor) -> Tensor:
        """With its position in it; the values of the angles are none on the meta device."""
        angles = torch.empty(x.shape[-2], self.head, dtype=x.dtype, device=x.device)
        one, other = x.chunk(2, -1)
        return x * angles + torch.cat([-other, one], -1) * angles


class Head(nn.Module):
    """Norm and loss of the next token. Logits are there for a piece of the tokens, and again for its backward."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = Norm(config.width)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.norm(x).flatten(0, 1).split(PIECE)
        return torch.stack([checkpoint(self.loss, piece, use_reentrant=False) for piece in pieces])

    def loss(self, piece: Tensor) -> Tensor:
        """The sum over a piece; the labels stand for any."""
        labels = torch.zeros(len(piece), dtype=torch.long, device=piece.device)
        return F.cross_entropy(self.logits(piece).float(), labels, reduction="sum")


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the tokens."""
    return output.sum() / target.numel()


# Attention that holds no scores, as flash attention: its shapes, and its operations, half of all pairs.


@torch.library.custom_op("pipework_benchmarks::causal_attention", mutates_args=())
def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The attended values, and a number for each row that the backward needs."""
    raise NotImplementedError("only on the meta device")


@torch.library.custom_op("pipework_benchmarks::causal_attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    raise NotImplementedError("only on the meta device")


@causal_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    tokens_first = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    return tokens_first.transpose(1, 2), query.new_empty(query.shape[:-1], dtype=torch.float32)


@attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = attention_backward(gradient, *ctx.saved_tensors)
    return gradients


causal_attention.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.pipework_benchmarks.causal_attention)
def _forward_operations(query: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Two products for each pair of tokens of which the second is not later."""
    return 2 * math.prod(query) * query[-2]


@register_flop_formula(torch.ops.pipework_benchmarks.causal_attention_backward)
def _backward_operations(_: Any, query: tuple[int, ...], *__: Any, **___: Any) -> int:
    """Five products, of which one computes the scores again."""
    return 5 * math.prod(query) * query[-2]
