"""Streams, copies between devices and random numbers on accelerators; skipped where there is none.

With several accelerators several are used, with one all workers share it. The values are those of the un-pipelined
model on the CPU: bit for bit on the simulated accelerator (`tests/accelerator/`), on others in double precision to
almost all digits.
"""

import copy
import gc
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipework
from pipework import MicroBatches, Pipe, balance_by_size, balance_by_time, pop, skippable, stash
from pipework.runtime.device import Link
from pipework.schedule import SCHEDULES
from pipework.testing import draw_key, reference_backward, reference_step
from tests.conftest import WAYS
from tests.helpers import Overwrite, WithAView

pytestmark = pytest.mark.gpu

WIDTH = 256


def accelerator(number: int = 0) -> torch.device:
    """One of the accelerators, counted round."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, number % torch.accelerator.device_count())


def model(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)),
        nn.Linear(WIDTH, 10),
    )


def devices_of(kind: str) -> list[torch.device]:
    gpu, other, cpu = accelerator(), accelerator(1), torch.device("cpu")
    return {
        "one stage": [gpu],
        "two stages on one": [gpu, gpu],
        "four stages on one": [gpu] * 4,
        "cpu to gpu": [cpu, gpu],
        "gpu to cpu": [gpu, cpu],
        "there and back": [cpu, gpu, cpu, gpu],
        "two": [gpu, other],
        "four": [accelerator(number) for number in range(4)],
        "two stages on each of two": [gpu, other, gpu, other],
        "cpu between two": [gpu, cpu, other, cpu],
    }[kind]


KINDS = [
    "one stage", "two stages on one", "four stages on one", "cpu to gpu", "gpu to cpu", "there and back", "two", "four",
    "two stages on each of two", "cpu between two",
]  # fmt: skip
BALANCES = {1: [5], 2: [2, 3], 4: [1, 1, 1, 2]}

every_kind = pytest.mark.parametrize("kind", KINDS)


def same(actual: Tensor, expected: Tensor) -> None:
    exact = accelerator().type == "sim"
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0 if exact else 1e-9, atol=0 if exact else 1e-12)


def same_gradients(pipe: nn.Module, plain: nn.Module) -> None:
    for actual, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert actual.grad is not None
        assert expected.grad is not None
        same(actual.grad, expected.grad)


def batches(count: int, rows: int = 64) -> Iterable[tuple[Tensor, Tensor]]:
    """Inputs and targets. A missing synchronisation shows when memory is reused, hence several."""
    for _ in range(count):
        yield torch.randn(rows, WIDTH, dtype=torch.float64), torch.randint(10, (rows,))


def same_step_inside(
    pipe: Pipe, plain: nn.Sequential, x: Tensor | MicroBatches, y: Tensor | MicroBatches, chunks: int = 4
) -> None:
    """One step of both, from gradients that are None."""
    reference = reference_step(plain, x, y, F.cross_entropy, chunks, draw_key())
    loss = pipe(x, target=y)
    loss.backward()
    same(loss, reference.loss)
    same_gradients(pipe, plain)


def same_step_outside(pipe: Pipe, plain: nn.Sequential, x: Tensor, where: torch.device | str = "cpu") -> None:
    """One step of both with a loss of the outputs; the gradient of the inputs is where these are."""
    inputs = [x.clone().requires_grad_(), x.to(where, copy=True).requires_grad_()]
    plain.zero_grad()
    pipe.zero_grad()
    reference = reference_backward(plain, inputs[0], lambda output: output.square().sum(), 4, draw_key())
    output = pipe(inputs[1])
    assert output.device == pipe.devices[-1]
    output.square().sum().backward()
    same(output, reference.output)
    same_gradients(pipe, plain)
    assert inputs[1].grad is not None
    assert inputs[1].grad.device == torch.device(where)
    same(inputs[1].grad, inputs[0].grad)


@every_kind
def test_gradients_with_the_loss_outside_and_inside(kind: str, checkpoint: str) -> None:
    devices = devices_of(kind)
    plain = model().double()
    where = {"balance": BALANCES[len(devices)], "devices": devices}
    outside = Pipe(copy.deepcopy(plain), 4, checkpoint, **where)
    inside = Pipe(copy.deepcopy(plain), 4, checkpoint, schedule="1f1b", loss_fn=F.cross_entropy, **where)
    assert outside[0][0].weight.device == devices[0]
    for x, y in batches(3):
        same_step_outside(outside, plain, x)
        plain.zero_grad()
        inside.zero_grad()
        same_step_inside(inside, plain, x, y)


@pytest.mark.parametrize("schedule", [name for name in WAYS if name != "outside"])
def test_every_schedule_on_two_devices(schedule: str, checkpoint: str) -> None:
    plain = model().double()
    workers = 4 // SCHEDULES[schedule].stages_per_worker
    pipe = Pipe(
        copy.deepcopy(plain), 4, checkpoint, balance=[1, 1, 1, 2], schedule=schedule, loss_fn=F.cross_entropy,
        devices=[accelerator(worker % 2) for worker in range(workers)],
    )  # fmt: skip
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (plain, pipe)]
    for x, y in batches(3):
        same_step_inside(pipe, plain, x, y)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("place", [0, 1])
def test_inputs_may_lie_anywhere_and_get_their_gradients_there(place: int) -> None:
    plain = model().double()
    pipe = Pipe(copy.deepcopy(plain), 4, balance=[2, 3], devices=devices_of("two"))
    for x, _ in batches(3):
        same_step_outside(pipe, plain, x, accelerator(place))


@pytest.mark.parametrize("stages", [1, 2, 4])
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


def test_recorded_times_are_the_devices_and_a_prediction_knows_these() -> None:
    devices = devices_of("two")
    pipe = Pipe(model(), 4, "never", balance=[2, 3], devices=devices, schedule="1f1b", loss_fn=F.cross_entropy)
    x, y = torch.randn(64, WIDTH), torch.randint(10, (64,))
    pipe(x, target=y).backward()
    with pipe.record() as recording:
        pipe(x, target=y).backward()
    assert all(interval.end > interval.start for interval in recording.timeline().intervals)
    predicted = pipe.predict(x, target=y)
    assert list(predicted.devices) == devices
    assert predicted.seconds > 0
    weights = [sum(p.nbytes for p in layers.parameters()) for layers in pipe.partitions]
    assert [stage.weights for stage in predicted.stages] == weights


@pytest.mark.parametrize(
    ("model_is", "kind"),
    [
        *(("cpu", "two"), ("there", "two stages on one"), ("cpu", "cpu to gpu")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("cpu", "two stages on one"), ("there", "two"))),
        pytest.param("there", "cpu to gpu", marks=pytest.mark.slow),
    ],
)
def test_a_plan(kind: str, model_is: str) -> None:
    devices = devices_of(kind)
    module, x, y = model(), torch.randn(64, WIDTH), torch.randint(10, (64,))
    if model_is == "there":
        module.to(devices[0])
    before = {name: (each, each.device) for name, each in module.named_parameters()}
    lines: list[str] = []
    plan = pipework.plan(
        module, x, target=y, loss_fn=F.cross_entropy, devices=devices, memory="1GiB", iterations=30, timeout=0,
        progress=lines.append,
    )  # fmt: skip
    assert any("median of" in line for line in lines), lines
    for name, each in module.named_parameters():
        assert each is before[name][0]
        assert each.device == before[name][1]
        assert each.grad is None
    pipe = Pipe(module, plan=plan, loss_fn=F.cross_entropy)
    pipe(x, target=y).backward()
    assert all(each.grad is not None for each in pipe.parameters())


def test_balances() -> None:
    module, x = model(), torch.randn(64, WIDTH)
    devices = devices_of("two")
    assert sum(balance_by_time(2, module, x, timeout=0, devices=devices)) == 5
    assert sum(balance_by_time(2, module, x, timeout=0, devices=[*devices[:1], "cpu"])) == 5
    sizes = balance_by_size(2, module, x, device="cpu")
    assert balance_by_size(2, module, x, device=accelerator(1)) == sizes
    assert all(parameter.device == torch.device("cpu") for parameter in module.parameters())


def test_memory_does_not_grow() -> None:
    gc.collect()  # of earlier tests, which must not go while this one counts
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


@skippable(stash=["kept"])
class Keep(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        x = super().forward(x)
        yield stash("kept", x)
        return x.tanh()


@skippable(pop=["kept"])
class Add(nn.Module):
    def forward(self, x):
        kept = yield pop("kept")
        return x + kept.sigmoid()


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


@pytest.mark.parametrize("kind", ["two", "four", "cpu between two"])
def test_skips_between_devices(kind: str, checkpoint: str) -> None:
    devices = devices_of(kind)
    plain = nn.Sequential(Keep(), nn.Linear(WIDTH, WIDTH), Add(), nn.Linear(WIDTH, 10)).double()
    balance = [1] * 4 if len(devices) == 4 else [2, 2]
    pipe = Pipe(copy.deepcopy(plain), 4, checkpoint, balance=balance, devices=devices)
    for x, _ in batches(3):
        same_step_outside(pipe, plain, x)


def test_values_that_share_memory_share_it_on_another_device() -> None:
    plain = nn.Sequential(WithAView(WIDTH, WIDTH), Overwrite(), nn.Linear(2 * WIDTH - 1, 10)).double()
    plain[0].requires_grad_(False)
    pipe = Pipe(copy.deepcopy(plain), 4, "never", balance=[1, 2], devices=devices_of("two"))
    for x, _ in batches(2):  # a gradient for it would be refused
        same(pipe(x), torch.cat([plain(part) for part in x.tensor_split(4)]))
    pipe.requires_grad_(True)
    with pytest.raises(RuntimeError, match="share memory"):
        pipe(x)
