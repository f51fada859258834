"""Generators of devices, which several workers, pipes and threads move at once."""

import copy
import types

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.runtime.random.kernels import DeviceGenerator, device_generator
from pipework.runtime.random.streams import Key, RandomStream, mix
from pipework.testing import draw_key, reference_backward

WIDTH = 32
CPU = torch.device("cpu")
KINDS = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


def device_of(kind: str) -> torch.device:
    if kind == "cpu":
        return CPU
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


def blocks(dropout: float = 0.3) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)),
        nn.Linear(WIDTH, 10),
    )


def module(**functions: object) -> types.ModuleType:
    made = types.ModuleType("torch.example")
    made.__dict__.update(functions)
    return made


def without_generators(monkeypatch: pytest.MonkeyPatch, **functions: object) -> DeviceGenerator:
    """A device whose module has these functions; its default generator is the CPU's."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: module(**functions))
    return DeviceGenerator(CPU)


def of_functions(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> DeviceGenerator:
    """A device whose module has functions for the state of a generator alone."""
    return without_generators(
        monkeypatch,
        get_rng_state=lambda device: generator.get_state(),
        set_rng_state=lambda state, device: generator.set_state(state),
    )


def test_a_device_without_default_generators_is_moved_through_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator().manual_seed(1)
    generator, stream, before = of_functions(monkeypatch, own), RandomStream(Key(7)), own.get_state()
    stream.enter(2, 3)
    drawn = [generator.drawn(stream, lambda: torch.rand(3, generator=own)) for _ in range(2)]
    assert torch.equal(torch.cat(drawn), torch.rand(6, generator=torch.Generator().manual_seed(mix(7, 2, 3))))
    assert torch.equal(own.get_state(), before)


def test_a_device_whose_generator_cannot_be_moved_is_refused_when_layers_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = without_generators(monkeypatch, manual_seed=lambda seed: None)
    with pytest.raises(RuntimeError, match=r"torch.example has neither default_generators nor get_rng_state"):
        generator.get()
    assert generator.drawn(RandomStream(Key()), lambda: 5) == 5  # in evaluation nothing is moved


def test_a_device_has_one_generator() -> None:
    assert device_generator(torch.device("cpu")) is device_generator(torch.device("cpu"))


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient + torch.randn_like(gradient)


class Noisy(nn.Module):
    """Draws in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return _Noisy.apply(x)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_backward_draws_depends_on_the_key_alone(kind: str) -> None:
    device = device_of(kind)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), Noisy()) for _ in range(4)]
    pipe = Pipe(nn.Sequential(*layers), 4, "never", balance=[1] * 4, devices=[device] * 4)
    x = torch.randn(16, WIDTH, device=device)
    found = []
    for _ in range(5):
        pipe.zero_grad()
        torch.manual_seed(3)
        pipe(x).sum().backward()
        found.append([parameter.grad.clone() for parameter in pipe.parameters()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


class Inner(nn.Module):
    """Draws, calls another pipe on the same device, and draws again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.pipe = [Pipe(blocks().to(device), 2, "always", balance=[2, 3], devices=[device] * 2)]
        self.pipe[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.3)
        inner = x.detach().requires_grad_()
        added = self.pipe[0](inner).mean()
        torch.autograd.grad(added, [inner])
        return nn.functional.dropout(x, 0.3) + added.detach()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_may_call_another_pipe_on_its_device(kind: str, stages: int) -> None:
    device = device_of(kind)
    inner = Inner(device)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, inner, nn.Linear(WIDTH, 10)).to(device)
    pipe = Pipe(copy.copy(plain), 2, "never", balance={1: [4], 2: [2, 2]}[stages], devices=[device] * stages)
    x = torch.randn(8, WIDTH, device=device)
    torch.manual_seed(2)
    reference = reference_backward(plain, x, torch.sum, 2, draw_key())
    expected = [parameter.grad for parameter in plain.parameters()]
    plain.zero_grad()
    torch.manual_seed(2)
    output = pipe(x)
    output.sum().backward()
    assert torch.equal(output, reference.output)
    assert all(map(torch.equal, expected, [parameter.grad for parameter in pipe.parameters()]))


class CpuDraw(nn.Module):
    """Draws on the CPU, as layers that are dropped at random do, wherever its input lies."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(torch.rand(()))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_draws_on_the_cpu_is_of_its_stream_on_any_device(kind: str) -> None:
    device = device_of(kind)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), CpuDraw()) for _ in range(4))).to(device)
    pipe = Pipe(copy.deepcopy(plain), 4, "always", balance=[2, 2], devices=[device] * 2)
    x = torch.randn(16, WIDTH, device=device)
    torch.manual_seed(4)
    reference = reference_backward(plain, x, torch.sum, 4, draw_key())
    torch.manual_seed(4)
    output = pipe(x)
    after = torch.rand(1)
    output.sum().backward()
    assert torch.equal(output, reference.output)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), pipe.parameters(), strict=True))
    torch.manual_seed(4)
    draw_key()
    assert torch.equal(torch.rand(1), after), "the caller's generator has moved by the key alone"
