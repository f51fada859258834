"""Streams, copies between devices and random numbers on an accelerator; skipped where there is none."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework import Pipe, pop, skippable, stash
from pipework.runtime.device import Link
from pipework.testing import draw_key, reference_backward

pytestmark = pytest.mark.gpu

WIDTH = 256


def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


def model(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)),
        nn.Linear(WIDTH, 10),
    )


def devices_of(kind: str) -> list[torch.device]:
    gpu, cpu = accelerator(), torch.device("cpu")
    return {
        "one stage": [gpu],
        "two stages on one": [gpu, gpu],
        "four stages on one": [gpu] * 4,
        "cpu to gpu": [cpu, gpu],
        "gpu to cpu": [gpu, cpu],
        "there and back": [cpu, gpu, cpu, gpu],
    }[kind]


KINDS = ["one stage", "two stages on one", "four stages on one", "cpu to gpu", "gpu to cpu", "there and back"]
BALANCES = {1: [5], 2: [2, 3], 4: [1, 1, 1, 2]}


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_the_loss_outside(kind: str, checkpoint: str) -> None:
    devices = devices_of(kind)
    plain = model().double()
    pipe = Pipe(copy.deepcopy(plain), 4, checkpoint, balance=BALANCES[len(devices)], devices=devices)
    assert pipe[0][0].weight.device == devices[0]
    for _ in range(5):  # a missing synchronisation shows when memory is reused
        x, y = torch.randn(64, WIDTH, dtype=torch.float64), torch.randint(10, (64,))
        plain.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        pipe.zero_grad()
        output = pipe(x)
        assert output.device == devices[-1]
        F.cross_entropy(output, y.to(output.device)).backward()
        for expected, actual in zip(plain.parameters(), pipe.parameters(), strict=True):
            torch.testing.assert_close(actual.grad.cpu(), expected.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_dropout_is_the_same_for_any_number_of_stages_and_when_recomputed(stages: int, checkpoint: str) -> None:
    gpu = accelerator()
    plain = model(0.3).to(gpu)
    pipe = Pipe(copy.deepcopy(plain), 4, checkpoint, balance=BALANCES[stages], devices=[gpu] * stages)
    x = torch.randn(64, WIDTH, device=gpu)
    torch.manual_seed(1)
    key = draw_key()
    reference = reference_backward(plain, x, torch.sum, 4, key)
    torch.manual_seed(1)
    before = torch.get_device_module(gpu).get_rng_state(gpu)
    output = pipe(x)
    output.sum().backward()
    assert torch.equal(torch.get_device_module(gpu).get_rng_state(gpu), before)
    torch.testing.assert_close(output, reference.output)
    for expected, actual in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


def test_the_callers_own_stream_is_respected() -> None:
    gpu = accelerator()
    pipe = Pipe(model(), 4, balance=[2, 3], devices=[gpu, gpu])
    plain = copy.deepcopy(nn.Sequential(*pipe))
    stream = torch.Stream(gpu)
    with stream:
        x = torch.ones(2048, WIDTH, device=gpu)
        for _ in range(20):
            x = x * 1.01
        output = pipe(x)
        loss = output.square().mean()
        loss.backward()
        gradient = pipe[0][0].weight.grad * 2
    stream.synchronize()
    plain(x).square().mean().backward()
    torch.testing.assert_close(gradient, plain[0][0].weight.grad * 2)


def test_recorded_times_are_the_devices() -> None:
    gpu = accelerator()
    pipe = Pipe(model(), 4, balance=[2, 3], devices=[gpu, gpu])
    x = torch.randn(4096, WIDTH, device=gpu)
    pipe(x).sum().backward()
    with pipe.record() as timeline:
        pipe(x).sum().backward()
    measured = timeline.timeline()
    assert all(interval.end > interval.start for interval in measured.intervals)


def test_memory_does_not_grow() -> None:
    gpu = accelerator()
    pipe = Pipe(model(), 4, balance=[2, 3], devices=[gpu, gpu])

    def steps(count: int) -> int:
        for _ in range(count):
            pipe(torch.randn(64, WIDTH, device=gpu)).sum().backward()
            pipe.zero_grad()
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated()

    assert steps(50) == steps(100)


@skippable(stash=["skip"])
class Fork(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x[:1].sum()


@skippable(pop=["skip"])
class Use(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip.sum()


def test_a_skip_to_several_workers_of_one_device_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, large = accelerator(), 64 * WIDTH
    copied: list[int] = []
    copy_one = Link._copy

    def counting(self, tensor):
        copied.append(tensor.numel())
        return copy_one(self, tensor)

    monkeypatch.setattr(Link, "_copy", counting)
    pipe = Pipe(nn.Sequential(Fork(), Use(), Use(), Use()), balance=[1] * 4, devices=["cpu", gpu, gpu, gpu])
    x = torch.randn(64, WIDTH, requires_grad=True)
    output = pipe(x)
    assert copied.count(large) == 1
    output.backward()
    assert copied.count(large) == 2
    torch.testing.assert_close(x.grad[1:], torch.full((63, WIDTH), 3.0))
