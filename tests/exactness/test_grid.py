"""Models of many kinds, in every mode and cut everywhere, end three optimizer steps as the un-pipelined model does.

A sample of the grid is run each time, the whole of it where slow tests are asked for.
"""

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import DeferredBatchNorm, Namespace, NoChunk, Pipe, PipeSequential, pop, skippable, stash

CHECKPOINT_MODES = ("never", "except_last", "always")
CHUNKS = 4
ROWS = {"even": 8, "ragged": 7, "fewer-than-chunks": 2}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
STEPS = 3


def images(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 2, 8, 8),)


def vectors(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 6),)


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


# Others


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.2)),
        nn.Sequential(nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(96, 3)),
    )


class Mix(nn.Module):
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
    return PipeSequential(Mix(), Meet(), Mix(), Meet(), OnlyFirst())


def two_inputs(rows: int) -> tuple[Tensor, ...]:
    return torch.randn(rows, 6), torch.randn(rows, 4), torch.rand(rows, 1)


def frozen() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def thaw(model: nn.Module, step: int) -> None:
    """The first two layers are frozen in the first step, the last one in the second, a bias in the third."""
    layers = list(model)
    model.requires_grad_(True)
    if step == 0:
        nn.ModuleList(layers[:3]).requires_grad_(False)
    elif step == 1:
        layers[4].requires_grad_(False)
    else:
        layers[2].bias.requires_grad_(False)


@dataclass(frozen=True)
class Model:
    """A kind of model.

    Attributes:
        make: five layers.
        batch: inputs with that many rows.
        before_step: what the user changes before a step.
    """

    make: Callable[[], nn.Sequential]
    batch: Callable[[int], tuple[Tensor, ...]] = vectors
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None


MODELS = {
    "u-net": Model(u_net, images),
    "convolutional": Model(convolutional, images),
    "several-inputs": Model(several_inputs, two_inputs),
    "frozen-and-thawed": Model(frozen, before_step=thaw),
}
BALANCES = ([5], [2, 3], [1, 3, 1], [1, 1, 1, 1, 1])


def sampled(*axes: Any, each: int) -> list[Any]:
    """All combinations, of which a seeded choice of `each` is not slow for every pair of the first two axes' values."""
    chooser = random.Random(0)
    cases = []
    for first in itertools.product(*axes[:2]):
        others = list(itertools.product(*axes[2:]))
        chosen = set(chooser.sample(range(len(others)), each))
        cases += [
            pytest.param(*first, *other, marks=() if number in chosen else pytest.mark.slow)
            for number, other in enumerate(others)
        ]
    return cases


@pytest.mark.parametrize(
    ("name", "checkpoint", "balance", "rows", "dtype"),
    sampled(MODELS, CHECKPOINT_MODES, BALANCES, ROWS, DTYPES, each=5),
)
def test_every_model(
    name: str,
    checkpoint: str,
    balance: list[int],
    rows: str,
    dtype: torch.dtype,
    assert_trained_alike: Callable[..., None],
) -> None:
    model = MODELS[name]
    plain = model.make().to(dtype)
    pipe = Pipe(copy.deepcopy(plain), CHUNKS, checkpoint, balance=balance, devices=["cpu"] * len(balance))
    batches = [tuple(tensor.to(dtype) for tensor in model.batch(ROWS[rows])) for _ in range(STEPS)]
    assert_trained_alike(plain, pipe, batches, before_step=model.before_step, evaluate=True)


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
    ("checkpoint", "rows", "balance", "dtype"),
    sampled(CHECKPOINT_MODES, ROWS, BALANCES, (torch.float32, torch.float64), each=2),
)
def test_deferred_batch_norm(
    checkpoint: str,
    rows: str,
    balance: list[int],
    dtype: torch.dtype,
    assert_trained_alike: Callable[..., None],
) -> None:
    module = convolutional().to(dtype)
    plain = forgetful(module)
    statistics = {name: copy.deepcopy(norm) for name, norm in module.named_modules() if type(norm) is nn.BatchNorm2d}
    seen: dict[str, list[Tensor]] = {name: [] for name in statistics}
    for name in statistics:
        plain.get_submodule(name).register_forward_pre_hook(lambda _, inputs, n=name: seen[n].append(inputs[0]))

    pipe = Pipe(module, CHUNKS, checkpoint, True, balance=balance, devices=["cpu"] * len(balance))
    batches = [tuple(tensor.to(dtype) for tensor in images(ROWS[rows])) for _ in range(STEPS)]
    assert_trained_alike(plain, pipe, batches, buffers=False, evaluate=True)

    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    micro_batches = min(CHUNKS, ROWS[rows])
    for name, whole in statistics.items():
        for step in range(STEPS):
            whole(torch.cat(seen[name][step * micro_batches : (step + 1) * micro_batches]))
        deferred = pipe.get_submodule(name)
        assert isinstance(deferred, DeferredBatchNorm)
        for expected, actual in zip(whole.buffers(), deferred.buffers(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# What two stages share: each sums its own part first, so the sum of both is equal but for rounding


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


@pytest.mark.parametrize(
    ("make", "checkpoint", "balance", "rows"),
    sampled((one_module_twice, one_parameter_twice), CHECKPOINT_MODES, BALANCES, ROWS, each=5),
)
def test_what_is_tied(
    make: Callable[[], nn.Sequential],
    checkpoint: str,
    balance: list[int],
    rows: str,
    assert_trained_alike: Callable[..., None],
) -> None:
    plain = make().double()
    pipe = Pipe(copy.deepcopy(plain), CHUNKS, checkpoint, balance=balance, devices=["cpu"] * len(balance))
    batches = [(torch.randn(ROWS[rows], 6, dtype=torch.float64),) for _ in range(STEPS)]
    compare = {} if len(balance) == 1 else {"same": almost}
    assert_trained_alike(plain, pipe, batches, evaluate=True, **compare)
    assert len(list(pipe.parameters())) == len(list(plain.parameters()))


# A tensor that every micro-batch gets whole


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", BALANCES[1:3], ids=str)
def test_a_tensor_given_whole_gets_the_sum_of_the_micro_batches(balance: list[int], checkpoint: str) -> None:
    plain = several_inputs()
    pipe = Pipe(copy.deepcopy(plain), CHUNKS, checkpoint, balance=balance, devices=["cpu"] * len(balance))
    x, y, _ = two_inputs(7)
    mask = torch.rand(1, 1, requires_grad=True)
    parts = [plain(*parts, mask) for parts in zip(x.tensor_split(CHUNKS), y.tensor_split(CHUNKS), strict=True)]
    expected = sum(torch.autograd.grad(part.sum(), mask)[0] for part in parts)
    output = pipe(x, y, NoChunk(mask))
    assert torch.equal(output, torch.cat(parts))
    assert torch.equal(torch.autograd.grad(output.sum(), mask)[0], expected)
