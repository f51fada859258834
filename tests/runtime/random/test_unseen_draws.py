"""Kernels that draw without a wrapper, and layers that begin to draw late: the numbers of a plain model in any case."""

import copy
import threading
import types
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe
from pipework.runtime.random.kernels import DeviceGenerator, device_generator
from pipework.runtime.random.streams import Key, RandomStream, micro_batch_here, mix
from pipework.runtime.random.unseen_draws import LOOKS, Hold, UnseenDraws
from pipework.testing import draw_key, reference_step

WIDTH, ROWS, CHUNKS = 32, 16, 4
STEPS = LOOKS + 3


def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


class Begins(nn.Module):
    """Draws when it is told to."""

    def __init__(self, on: bool = True) -> None:
        super().__init__()
        self.on = on

    def forward(self, x: Tensor) -> Tensor:
        return x * self.numbers(x) if self.on else x


class Extension(Begins):
    """A dropout whose kernel PyTorch does not know: it reads the default generator's seed and offset itself."""

    def numbers(self, x: Tensor) -> Tensor:
        generator = torch.get_device_module(x.device).default_generators[x.device.index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + 4)
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(mix(seed, offset, 0))).to(x.device)


class Seeded(Begins):
    """Draws the same numbers for each micro-batch, and puts the generator back."""

    def numbers(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng([x.device.index], device_type=x.device.type):
            torch.get_device_module(x.device).manual_seed(5)
            return torch.rand_like(x)


class Late(Begins):
    """Draws for the micro-batches that begin with a positive number only."""

    def numbers(self, x: Tensor) -> Tensor:
        return torch.rand_like(x) if float(x.detach()[0, 0]) > 0 else torch.ones_like(x)


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


@pytest.mark.gpu
@pytest.mark.parametrize("balance", [[6], [3, 3], [1, 2, 2, 1]])
def test_a_layer_may_begin_to_draw_at_any_time(balance: list[int]) -> None:
    plain = blocks(Late(False), Late(False)).to(accelerator())
    pipe = pipe_of(plain, balance)
    for seed in range(2 * STEPS):
        for model in (plain, pipe):
            for layer in model.modules():
                if isinstance(layer, Late):
                    layer.on = seed >= STEPS
        compare(plain, pipe, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("balance", [[6], [3, 3]])
@pytest.mark.parametrize("kind", [Extension, Seeded])
def test_an_extension_that_begins_to_draw_is_seen_at_once(
    kind: type[Extension] | type[Seeded], balance: list[int]
) -> None:
    plain = blocks(kind(on=False), kind(on=False)).to(accelerator())
    pipe = pipe_of(plain, balance)
    for seed in range(STEPS):
        compare(plain, pipe, seed)
    for model in (plain, pipe):
        for layer in model.modules():
            if isinstance(layer, kind):
                layer.on = True
    with pytest.raises(RuntimeError, match=r"drew random numbers by a kernel of an extension or of fused attention"):
        compare(plain, pipe, 100)
    assert device_generator(accelerator()).get() == (100, 0), "the caller's generator is as it was"
    plain.zero_grad()
    assert all(parameter.grad is None for parameter in pipe.parameters())
    for seed in range(STEPS):
        compare(plain, pipe, seed)


class Together(nn.Module):
    """Draws, waits for the other worker's layer to have drawn, and draws again."""

    def __init__(self, stage: int, met: threading.Barrier) -> None:
        super().__init__()
        self.stage, self.met, self.waits = stage, [met], False

    def __deepcopy__(self, memo: object) -> "Together":
        return Together(self.stage, self.met[0])

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2)
        if self.waits and micro_batch_here() == 1 - self.stage and torch.is_grad_enabled():
            self.met[0].wait(60)
        return F.dropout(x, 0.2)


@pytest.mark.gpu
def test_workers_of_one_device_do_not_wait_for_each_other() -> None:
    met = threading.Barrier(2)
    plain = blocks(Together(0, met), Together(1, met)).to(accelerator())
    pipe = Pipe(
        copy.deepcopy(plain), CHUNKS, "never", balance=[3, 3], devices=[accelerator()] * 2, schedule="gpipe",
        loss_fn=F.mse_loss,
    )  # fmt: skip
    for seed in range(STEPS):
        for layer in pipe.modules():
            if isinstance(layer, Together):
                layer.waits = seed >= LOOKS
        compare(plain, pipe, seed)


@pytest.mark.gpu
def test_threads_of_the_users_may_draw_where_layers_do_not() -> None:
    device, over = accelerator(), threading.Event()
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, balance=[1, 1], devices=[device] * 2)
    generator = torch.get_device_module(device).default_generators[0]

    def draw() -> None:
        while not over.is_set():
            generator.set_offset(generator.get_offset() + 4)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(3):
            pipe(torch.ones(4, 2, device=device)).sum().backward()
    finally:
        over.set()
        thread.join()


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
    device, layers = accelerator(), nn.Sequential(Late(False), Late(False)).eval()
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


def test_a_held_generator_that_is_given_up_is_free_for_others_and_then_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = torch.Generator().manual_seed(1)
    module = types.ModuleType("torch.example")
    module.__dict__["get_rng_state"] = lambda device: own.get_state()
    module.__dict__["set_rng_state"] = lambda state, device: own.set_state(state)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    shared, stream, other_stream = DeviceGenerator(torch.device("cpu")), RandomStream(Key(1)), RandomStream(Key(2))
    expected = torch.rand(2, generator=torch.Generator().manual_seed(mix(1, 0, 0)))
    found: list[Tensor] = []

    def other() -> None:
        with Hold(UnseenDraws(shared), other_stream):
            found.append(own.get_state())
            other_stream.enter(0, 0)
            torch.rand(5, generator=own)

    before, draws = own.get_state(), UnseenDraws(shared)
    with Hold(draws, stream) as hold:
        stream.enter(0, 0)
        drawn = [torch.rand(1, generator=own)]
        with hold.given_up():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(30)
        drawn.append(torch.rand(1, generator=own))
    assert torch.equal(found[0], before), "meanwhile the generator is in the state that the caller left"
    assert torch.equal(torch.cat(drawn), expected)
    assert torch.equal(own.get_state(), before)
    assert draws.found


def test_a_worker_holds_in_its_first_runs_and_where_something_was_found() -> None:
    draws, stream = UnseenDraws(DeviceGenerator(torch.device("cpu"))), RandomStream(Key(1))
    draws.generator.get = lambda: ()  # type: ignore[method-assign]
    assert [draws.hold(stream, always=False) is not None for _ in range(LOOKS + 2)] == [True] * LOOKS + [False] * 2
    assert draws.hold(stream, always=True) is not None
    draws.found = True
    assert draws.hold(stream, always=False) is not None


def test_nobody_looks_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch.example")
    module.__dict__["is_current_stream_capturing"] = lambda: True
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    draws, stream = UnseenDraws(DeviceGenerator(torch.device("cpu"))), RandomStream(Key(1))
    assert draws.hold(stream, always=False) is None
    monkeypatch.setattr(draws.generator, "get", Mock(side_effect=RuntimeError("during CUDA graph capture")))
    with pytest.raises(RuntimeError, match="graph capture"):  # of the device, before any worker begins
        draws.hold(stream, always=True)
