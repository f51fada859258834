"""Random models of layers that return and need tensors of every layout, cut at random: bitwise as without cuts."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from pipework import Pipe, PipeSequential
from pipework.testing import draw_key
from tests.conftest import CHECKPOINT_MODES, USUAL, WAYS, bitwise, distance, named_gradients
from tests.ranks import held, own_mesh


class Does(nn.Module):
    """A function of modules and parameters; values have the shape (rows, places, width)."""

    def __init__(self, act: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.act = act
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if type(part) is Tensor else part)

    def forward(self, *inputs: Any) -> Any:
        return self.act(self, *inputs)

    def extra_repr(self) -> str:
        return self.act.__qualname__.partition(".")[0]


# Each of these makes one or two layers, for values with so many places of so many numbers.


def recurrent(places: int, width: int) -> list[nn.Module]:
    kind = random.choice([nn.GRU, nn.LSTM, nn.RNN])
    layer = kind(width, width, batch_first=random.random() < 0.7)
    return [Does(lambda self, x: self.layer(x)[0], layer=layer)]


def attention(places: int, width: int) -> list[nn.Module]:
    layer = nn.MultiheadAttention(width, 2, batch_first=random.random() < 0.7)
    return [Does(lambda self, x: self.layer(x, x, x, need_weights=False)[0], layer=layer)]


def attention_of_heads(places: int, width: int) -> list[nn.Module]:
    def act(self: Any, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.linear(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    return [Does(act, linear=nn.Linear(width, 3 * width))]


def encoder(places: int, width: int) -> list[nn.Module]:
    options = {"batch_first": random.random() < 0.7, "norm_first": random.random() < 0.5}
    return [nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, **options)]


def convolution(places: int, width: int) -> list[nn.Module]:
    layer = nn.Conv1d(width, width, 3, padding=1, groups=random.choice([1, 2]))
    return [Does(lambda self, x: self.layer(x.transpose(1, 2)).transpose(1, 2), layer=layer)]


def images(places: int, width: int) -> list[nn.Module]:
    def act(self: Any, x: Tensor) -> Tensor:
        image = x.unflatten(-1, (2, -1)).permute(0, 2, 1, 3)
        if self.last:
            image = image.contiguous(memory_format=torch.channels_last)
        return self.layer(image).permute(0, 2, 1, 3).flatten(2)

    return [Does(act, layer=nn.Conv2d(2, 2, 3, padding=1), last=random.random() < 0.5)]


def slices(places: int, width: int) -> list[nn.Module]:
    begin = random.randrange(width)
    return [Does(lambda self, x: self.linear(x)[..., begin : begin + width], linear=nn.Linear(width, 2 * width))]


def every_second(places: int, width: int) -> list[nn.Module]:
    return [Does(lambda self, x: self.linear(x)[..., ::2], linear=nn.Linear(width, 2 * width))]


def halves(places: int, width: int) -> list[nn.Module]:
    first = Does(lambda self, x: self.linear(x).chunk(2, dim=-1), linear=nn.Linear(width, 2 * width))
    return [first, Does(lambda self, x, gate: x * gate.sigmoid() + self.bias, bias=torch.randn(width))]


def turned_halves(places: int, width: int) -> list[nn.Module]:
    first = Does(lambda self, x: self.linear(x).transpose(1, 2).chunk(2, dim=1), linear=nn.Linear(width, 2 * width))
    return [first, Does(lambda self, a, b: torch.bmm(a.transpose(1, 2), self.weight + b @ b.mT), weight=square(width))]


def einsum(places: int, width: int) -> list[nn.Module]:
    form = random.choice(["ntd,de->nte", "ntd,de->tne", "ntd,de->ent", "ntd,ed->nte"])
    order = {"nte": (0, 1, 2), "tne": (1, 0, 2), "ent": (1, 2, 0)}[form[-3:]]
    return [Does(lambda self, x: torch.einsum(form, x, self.weight).permute(order), weight=square(width))]


def parametrized(places: int, width: int) -> list[nn.Module]:
    kind = random.choice([parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm])
    layer = kind(nn.Linear(width, width))
    return [layer, Does(lambda self, x: x.mT, ), Does(lambda self, x: x.mT.relu())]  # fmt: skip


def experts(places: int, width: int) -> list[nn.Module]:
    def act(self: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, width)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, which = (chosen == number).nonzero(as_tuple=True)
            total = total.index_add(0, at, expert(rows[at]) * weights[at, which, None])
        return total.view_as(x)

    return [Does(act, gate=nn.Linear(width, 3), experts=nn.ModuleList([nn.Linear(width, width) for _ in range(3)]))]


def gates(places: int, width: int) -> list[nn.Module]:
    first = Does(lambda self, x: (x, self.gate(x).softmax(-1)), gate=nn.Linear(width, 3))
    mixed = Does(
        lambda self, x, gate: torch.einsum("ntd,ntk,kde->nte", x, gate, self.weights), weights=square(3, width)
    )
    return [first, mixed]


def expanded(places: int, width: int) -> list[nn.Module]:
    dimension = random.choice([1, 2])
    return [Does(lambda self, x: x.mean(dimension, keepdim=True).expand_as(x)), nn.Linear(width, width)]


def summed(places: int, width: int) -> list[nn.Module]:
    return [Does(lambda self, x: x * self.gain + x.sum(1, keepdim=True) * x.mean(2, keepdim=True), gain=torch.ones(1))]


def normed(places: int, width: int) -> list[nn.Module]:
    kind = random.choice([nn.LayerNorm(width), nn.RMSNorm(width), nn.Dropout(0.2), nn.Softmax(dim=1), nn.GELU()])
    return [kind]


def normed_in_groups(places: int, width: int) -> list[nn.Module]:
    norm = nn.GroupNorm(2, width) if places == 1 else nn.BatchNorm1d(width, momentum=None)  # refuses a single value
    kind = random.choice([nn.GroupNorm(2, width), norm, nn.AvgPool1d(3, 1, 1)])
    return [Does(lambda self, x: self.norm(x.mT + x.mT.cumsum(-1)).mT, norm=kind)]


def residual(places: int, width: int) -> list[nn.Module]:
    return [Does(lambda self, x: x + self.linear(x.relu()) + x.flip(1), linear=nn.Linear(width, width))]


def overwritten(places: int, width: int) -> list[nn.Module]:
    linear = nn.Linear(width, width)
    return [Does(lambda self, x: self.linear(x).mT, linear=linear), nn.ReLU(inplace=True), Does(lambda self, x: x.mT)]


def windows(places: int, width: int) -> list[nn.Module]:
    first = Does(lambda self, x: F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1))
    return [
        first,
        Does(
            lambda self, x: torch.einsum("ntdk,kde->nte", x, self.weight), weight=torch.randn(3, width, width) / width
        ),
    ]


def bilinear(places: int, width: int) -> list[nn.Module]:
    layer = nn.Bilinear(width, width, width)
    return [Does(lambda self, x: (x, x.roll(1, 1))), layer]


def gathered(places: int, width: int) -> list[nn.Module]:
    order = [random.randrange(places) for _ in range(places)]
    return [Does(lambda self, x: x[:, order] + self.table.weight[order].sin(), table=nn.Embedding(places, width))]


def waves(places: int, width: int) -> list[nn.Module]:
    def act(self: Any, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=places, dim=1)

    return [Does(act, filter=torch.randn(width))]


def square(*shape: int) -> Tensor:
    return torch.randn(*shape, shape[-1]) / shape[-1] ** 0.5


KINDS = [
    recurrent, attention, attention_of_heads, encoder, convolution, images, slices,
    every_second, halves, turned_halves, einsum, parametrized, experts, gates, expanded, summed, normed,
    normed_in_groups, residual, overwritten, windows, bilinear, gathered, waves,
]  # fmt: skip


def random_model(places: int, width: int, kinds: int) -> nn.Sequential:
    """A model of so many random kinds of layers; some have a weight in several places."""
    groups = [kind(places, width) for kind in random.choices(KINDS, k=kinds)]
    if own_mesh() is None and random.random() < 0.3:  # each process sums its own uses first
        shared = nn.Linear(width, width)
        turned = Does(
            lambda self, x: x @ self.weight + self.weight.mean() * (x @ self.weight.t()), weight=shared.weight
        )
        for layer in [shared, turned, random.choice([shared, turned, nn.Sequential(shared, nn.Tanh(), shared)])]:
            groups.insert(random.randrange(len(groups) + 1), [layer])
    return PipeSequential(*itertools.chain(*groups))


def random_balance(layers: int) -> list[int]:
    """With one cut, some, or one behind every layer."""
    cuts = random.choice([1, layers // 2, layers - 1, layers - 1])
    ends = [0, *sorted(random.sample(range(1, layers), cuts)), layers]
    return [end - begin for begin, end in itertools.pairwise(ends)]


# Their gradients have the strides of the output, transposed ones, or elements that share memory.
LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [
    distance,
    lambda output, target: output.sigmoid().mean(),
    lambda output, target: F.cross_entropy(output.mT, target.long()[:, None].clamp(0, 3).expand(-1, output.shape[1])),
    lambda output, target: output.sum() / 100,
]


def check(seed: int, steps: int = 2, graphs: bool | str = False) -> Pipe:
    """Trains one random model for so many steps, and compares everything with the plain loop. Returns the pipe."""
    random.seed(seed)
    torch.manual_seed(seed)
    way = WAYS[random.choice(USUAL[1:] if graphs else USUAL)]
    places, width = random.choice([1, 2, 3, 5, 8]), random.choice([4, 8, 12, 20])
    rows, chunks = random.choice([2, 4, 7, 9]), random.choice([1, 2, 3, 4])
    dtype = random.choice([torch.float32, torch.float32, torch.float64])
    plain = random_model(places, width, random.choice([2, 3, 4, 6])).to(dtype)
    loss_fn = random.choice(LOSSES)
    options = {"balance": random_balance(len(plain)), "loss_fn": loss_fn, "graphs": graphs}
    pipe = way.pipe(plain, chunks, random.choice(CHECKPOINT_MODES), **options)
    needs_gradient = random.random() < 0.5 or not any(True for _ in plain.parameters())
    for step in range(steps):
        x, target = torch.randn(rows, places, width, dtype=dtype), torch.randn(rows)
        inputs = [x.clone().requires_grad_(needs_gradient) for _ in range(2)]
        torch.manual_seed(step)
        reference = way.reference(plain, inputs[0], target, chunks, draw_key(), loss_fn)
        torch.manual_seed(step)
        loss, output = way.run(pipe, inputs[1], target, loss_fn)
        loss.backward()
        bitwise(output, reference.output)
        bitwise(loss, reference.loss)
        here = held(plain, pipe)
        expected, actual = named_gradients(here), named_gradients(pipe)
        assert expected.keys() == actual.keys()
        for name in expected:
            bitwise(actual[name], expected[name])
        for name, buffer in here.named_buffers():
            bitwise(pipe.get_buffer(name), buffer)
        if needs_gradient:
            bitwise(inputs[1].grad, inputs[0].grad)
    return pipe


THOROUGH = [pytest.param([seed], marks=pytest.mark.thorough) for seed in range(4, 60)]
SLOW = [pytest.param(range(first, first + 50), marks=pytest.mark.slow) for first in range(100, 2100, 50)]


@pytest.mark.filterwarnings("ignore:.* is no mean over rows:pipework.PipeWarning")  # some losses are sums
@pytest.mark.parametrize("seeds", [*([seed] for seed in range(4)), *THOROUGH, *SLOW], ids=str)
@pytest.mark.filterwarnings("ignore:.*batch_first:pipework.PipeWarning")  # micro-batches of one row
def test_random_models(seeds: Sequence[int]) -> None:
    for seed in seeds:
        check(seed)
