"""Models of many kinds, in every way and mode and cut everywhere, end three steps as the un-pipelined model does.

A sample of the grid is run each time, the whole of it where slow tests are asked for.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import PipeSequential, pop, skippable, stash
from pipework.model.batchnorm import DeferredBatchNorm
from pipework.schedule import SCHEDULES
from pipework.skip import Namespace
from tests.conftest import CHECKPOINT_MODES
from tests.ranks import held, own_mesh
from tests.tiers import sampled

WAYS = ("outside", *(name for name in SCHEDULES if name not in ("fill-drain", "forward-only")))
CHUNKS = 4
ROWS = {"even": 8, "ragged": 7, "fewer-than-chunks": 2}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
STEPS = 3


def images(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 2, 8, 8),)


def vectors(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 6),)


def sequences(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 4, 16),)


# A U-Net: convolutions, batch norms, and skip connections over every distance


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(2 * channels)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.norm(self.convolution(x)))
        yield stash("skip", x)
        return nn.functional.max_pool2d(x, 2)


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * channels, 2 * channels, 2, stride=2)
        self.convolution = nn.Conv2d(4 * channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return torch.tanh(self.convolution(torch.cat([self.up(x), skip], dim=1)))


def u_net() -> nn.Sequential:
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Down(2).isolate(outer),
        Down(4).isolate(inner),
        nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout2d(0.3)),
        Up(4).isolate(inner),
        Up(2).isolate(outer),
    )


# Layers that draw


class Mix(nn.Module):
    """Draws in three ways and keeps a residual branch, so that gradients are summed inside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x) * 0.1
        kept = torch.bernoulli(torch.full_like(x, 0.8))
        return x + nn.functional.dropout(torch.tanh(self.linear(x + noise)), 0.2, self.training) * kept * self.gain


def drawing() -> nn.Sequential:
    return nn.Sequential(Mix(), nn.Dropout(0.5), Mix(), nn.LayerNorm(16), Mix())


def transformer() -> nn.Sequential:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)

    return nn.Sequential(nn.Linear(16, 16), block(), block(), nn.Dropout(0.2), nn.Linear(16, 5))


class Outputs(nn.Module):
    def forward(self, outputs: Tensor, state: object) -> Tensor:
        return outputs


def recurrent() -> nn.Sequential:
    lstm = nn.LSTM(16, 16, 2, dropout=0.3, batch_first=True)
    return PipeSequential(lstm, Outputs(), nn.Linear(16, 16), Mix(), nn.Tanh())


# Others


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.2)),
        nn.Sequential(nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(96, 3)),
    )


class Exchange(nn.Module):
    """Takes two tensors and what is given whole, returns two: one without and one with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(4, 6)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return y, torch.tanh(self.left(x) * mask + self.right(y)), mask


class Meet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(4, 6, 6)

    def forward(self, y: Tensor, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.bilinear(y, x) * mask, y, mask


class OnlyFirst(nn.Module):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return x + y.sum(1, keepdim=True)


def several_inputs() -> nn.Sequential:
    return PipeSequential(Exchange(), Meet(), Exchange(), Meet(), OnlyFirst())


def two_inputs(rows: int) -> tuple[Tensor, ...]:
    return torch.randn(rows, 6), torch.randn(rows, 4), torch.rand(rows, 1)


class Several(nn.Module):
    """Two outputs, of one of which only the other layer's parameters need the gradient; an input that needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = x.detach() if y is None else y
        return self.left(x) + y, self.right(y.detach())


class Join(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


def detached() -> nn.Sequential:
    return PipeSequential(Several(), Several(), Several(), Several(), Join())


def frozen() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def thaw(model: nn.Module, step: int) -> None:
    """The first two layers are frozen in the first step, the last one in the second, a bias in the third."""
    frozen = [("0.", "1.", "2."), ("4.",), ("2.bias",)][step]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))


# What two stages share; in two processes each sums its own part first, so the sum of both is equal but for rounding


def one_module_twice() -> nn.Sequential:
    shared = nn.Linear(6, 6)
    return nn.Sequential(shared, nn.Tanh(), nn.Sequential(nn.Linear(6, 6), shared), nn.Dropout(0.3), shared)


def one_parameter_twice() -> nn.Sequential:
    """As a language model whose last layer has the embedding's weight, with a transposed use in between."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False))
    model[4].weight = model[2].weight = model[0].weight
    return model


def almost(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Model:
    """A kind of model.

    Attributes:
        make: five layers.
        batch: inputs with that many rows.
        before_step: what the user changes before a step.
        is_tied: whether stages share parameters. In two processes each sums its own part first.
    """

    make: Callable[[], nn.Sequential]
    batch: Callable[[int], tuple[Tensor, ...]] = vectors
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None
    is_tied: bool = False


MODELS = {
    "u-net": Model(u_net, images),
    "convolutional": Model(convolutional, images),
    "several-inputs": Model(several_inputs, two_inputs),
    "detached": Model(detached),
    "frozen-and-thawed": Model(frozen, before_step=thaw),
    "transformer": Model(transformer, sequences),
    "drawing": Model(drawing, sequences),
    "recurrent": Model(recurrent, sequences),
    "module-twice": Model(one_module_twice, is_tied=True),
    "parameter-twice": Model(one_parameter_twice, is_tied=True),
}
BALANCES = ([5], [2, 3], [1, 3, 1], [1, 1, 1, 2], [1, 1, 1, 1, 1])


def train_model(
    name: str,
    way: Any,
    checkpoint: str,
    rows: str,
    dtype: torch.dtype,
    assert_trained_alike: Callable[..., None],
    **options: Any,
) -> None:
    """Trains a model of the table with and without a pipe, and compares."""
    model = MODELS[name]
    dtype = torch.float64 if model.is_tied else dtype
    plain = model.make().to(dtype)
    pipe = way.pipe(plain, CHUNKS, checkpoint, **options)
    batches = [tuple(tensor.to(dtype) for tensor in model.batch(ROWS[rows])) for _ in range(STEPS)]
    compare = {"same": almost} if model.is_tied and own_mesh() is not None else {}
    assert_trained_alike(plain, pipe, batches, way=way, before_step=model.before_step, evaluate=True, **compare)
    assert len(list(pipe.parameters())) == len(list(held(plain, pipe).parameters()))


@pytest.mark.parametrize(
    ("name", "way", "checkpoint", "balance", "rows", "dtype"),
    sampled(MODELS, WAYS, CHECKPOINT_MODES, BALANCES, ROWS, DTYPES, each=3),
    indirect=["way"],
)
def test_every_model(
    name: str,
    way: Any,
    checkpoint: str,
    balance: list[int],
    rows: str,
    dtype: torch.dtype,
    assert_trained_alike: Callable[..., None],
) -> None:
    train_model(name, way, checkpoint, rows, dtype, assert_trained_alike, balance=balance)


# Deferred batch norm: it computes what a batch norm without memory does, and remembers the whole mini-batch


def forgetful(module: nn.Sequential) -> nn.Sequential:
    """A copy whose batch norms have no running statistics."""
    twin = copy.deepcopy(module)
    for norm in twin.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return twin


@pytest.mark.parametrize(
    ("way", "checkpoint", "rows", "balance", "dtype", "offload"),
    sampled(WAYS, CHECKPOINT_MODES, ROWS, BALANCES, (torch.float32, torch.float64), (False, 1), each=5, whole=1),
    indirect=["way"],
)
def test_deferred_batch_norm(
    way: Any,
    checkpoint: str,
    rows: str,
    balance: list[int],
    dtype: torch.dtype,
    offload: bool | int,
    assert_trained_alike: Callable[..., None],
) -> None:
    module = convolutional().to(dtype)
    plain = forgetful(module)
    statistics = {name: copy.deepcopy(norm) for name, norm in module.named_modules() if type(norm) is nn.BatchNorm2d}
    seen: dict[str, list[Tensor]] = {name: [] for name in statistics}
    for name in statistics:
        plain.get_submodule(name).register_forward_pre_hook(lambda _, inputs, n=name: seen[n].append(inputs[0]))

    pipe = way.pipe(module, CHUNKS, checkpoint, True, balance=balance, offload=offload)
    batches = [tuple(tensor.to(dtype) for tensor in images(ROWS[rows])) for _ in range(STEPS)]
    assert_trained_alike(plain, pipe, batches, way=way, buffers=False, evaluate=True)

    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    micro_batches = min(CHUNKS, ROWS[rows])
    for name in statistics.keys() & dict(pipe.named_modules()):
        whole = statistics[name]
        for step in range(STEPS):
            whole(torch.cat(seen[name][step * micro_batches : (step + 1) * micro_batches]))
        deferred = pipe.get_submodule(name)
        assert isinstance(deferred, DeferredBatchNorm)
        for expected, actual in zip(whole.buffers(), deferred.buffers(), strict=True):
            torch.testing.assert_close(actual.to(expected.device), expected, rtol=tolerance, atol=tolerance)
