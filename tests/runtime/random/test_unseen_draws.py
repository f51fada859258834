"""Kernels that draw without a wrapper, and layers that begin to draw late: the numbers of a plain model in any case."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe
from pipework.runtime.random.kernels import device_generator
from pipework.runtime.random.streams import micro_batch_here, mix
from pipework.testing import draw_key, reference_step

WIDTH, ROWS, CHUNKS, STEPS = 32, 16, 4, 2


def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


class Extension(nn.Module):
    """A dropout whose kernel PyTorch does not know: it reads the default generator's seed and offset itself."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.get_device_module(x.device).default_generators[x.device.index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + 4)
        numbers = torch.rand(x.shape, generator=torch.Generator().manual_seed(mix(seed, offset, 0)))
        return x * numbers.to(x.device)


class Seeded(nn.Module):
    """Draws the same numbers for each micro-batch, and puts the generator back."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng([x.device.index], device_type=x.device.type):
            torch.get_device_module(x.device).manual_seed(5)
            return x * torch.rand_like(x)


class Late(nn.Module):
    """Draws when it is told to, and then for the micro-batches that begin with a positive number only."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x) if self.on and float(x.detach()[0, 0]) > 0 else x


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(len(x), 1, 4, -1)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).reshape(x.shape)


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.view(len(x), 1, WIDTH).expand(-1, 3, -1))[0][:, -1]


def blocks(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for each in between for layer in (nn.Linear(WIDTH, WIDTH), each, nn.Dropout(0.2))))


def compare(plain: nn.Sequential, pipe: Pipe, seed: int, rtol: float = 0) -> None:
    """A step of both, from the same seed."""
    device = accelerator()
    x, y = torch.randn(ROWS, WIDTH, device=device), torch.randn(ROWS, WIDTH, device=device)
    torch.manual_seed(seed)
    expected = reference_step(plain, x, y, F.mse_loss, CHUNKS, draw_key())
    torch.manual_seed(seed)
    state = device_generator(device).get()
    loss = pipe(x, target=y)
    loss.backward()
    assert device_generator(device).get() == state, "the caller's generator is as it was"
    torch.testing.assert_close(loss, expected.loss, rtol=rtol, atol=0)
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=rtol, atol=rtol)
    plain.zero_grad()
    pipe.zero_grad()


def pipe_of(plain: nn.Sequential, balance: list[int], **options: bool) -> Pipe:
    return Pipe(
        copy.deepcopy(plain), CHUNKS, "always", balance=balance, devices=[accelerator()] * len(balance),
        schedule="1f1b", loss_fn=F.mse_loss, **options,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("debug", [(), "one_thread"])
@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 2, 2, 1]])
@pytest.mark.parametrize("layer", [Extension, Seeded, Attention, Recurrent])
def test_numbers_depend_on_no_cut(layer: Callable[[], nn.Module], balance: list[int], debug: object) -> None:
    plain = blocks(layer(), layer()).to(accelerator())
    pipe = pipe_of(plain, balance, debug=debug)
    for seed in range(STEPS):
        # Kernels of attention and of recurrent layers may add in any order on a real device.
        exact = layer in (Extension, Seeded) or accelerator().type == "sim"
        compare(plain, pipe, seed, rtol=0 if exact else 1e-4)


class OfEach(nn.Module):
    """Saves the generators of two devices at the same time as another worker, then draws."""

    def __init__(self, stage: int, met: threading.Barrier) -> None:
        super().__init__()
        self.stage, self.met = stage, met

    def forward(self, x: Tensor) -> Tensor:
        if micro_batch_here() == 1 - self.stage:
            self.met.wait(60)
        with torch.random.fork_rng([0, 1], device_type=x.device.type):
            return x * torch.rand_like(x)


@pytest.mark.gpu
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
def test_workers_that_hold_their_generators_do_not_wait_for_each_others() -> None:
    kind, met = accelerator().type, threading.Barrier(2)
    devices = [torch.device(kind, 0), torch.device(kind, 1)]
    layers = nn.Sequential(OfEach(0, met), OfEach(1, met))
    pipe = Pipe(layers, 2, "never", balance=[1, 1], devices=devices, schedule="gpipe")
    x = torch.ones(2, 2, device=devices[0])
    torch.manual_seed(0)
    key = draw_key()
    expected = []
    for micro_batch in range(2):
        row = torch.ones(1, 2)
        for layer in range(2):
            generator = torch.Generator(devices[layer]).manual_seed(mix(key, layer, micro_batch))
            row = row * torch.rand(1, 2, generator=generator, device=devices[layer]).cpu()
        expected.append(row)
    torch.manual_seed(0)
    assert torch.equal(pipe(x).cpu(), torch.cat(expected))


@pytest.mark.gpu
def test_in_evaluation_the_numbers_are_those_of_the_callers_generator() -> None:
    device, layers = accelerator(), nn.Sequential(Late(), Late()).eval()
    pipe, x = Pipe(layers, 1, devices=[device]), torch.ones(2, 2, device=device)
    for layer in layers:
        layer.on = True
    generator = device_generator(device)
    before = generator.get()
    expected = x * torch.rand_like(x) * torch.rand_like(x)
    after = generator.get()
    generator.set(before)
    with torch.no_grad():
        assert torch.equal(pipe(x), expected)
    assert generator.get() == after
