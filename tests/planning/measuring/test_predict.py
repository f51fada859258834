"""What `pipe.predict` says against what is then measured."""

import copy
import gc
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipework import HostOptimizer, Pipe, PipeSequential, balance_by_size, balance_by_time, pop, skippable, stash
from pipework.planning.measuring import stage_copy
from pipework.schedule import SCHEDULES
from pipework.skip import Namespace
from tests.conftest import WAYS


@skippable(stash=["skip"])
class Down(nn.Linear):
    def forward(self, x: torch.Tensor):
        x = super().forward(x)
        yield stash("skip", x)
        return torch.tanh(x)


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, x: torch.Tensor):
        return x * (yield pop("skip"))


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8),
        Down(8, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(8, 8),
        Up(),
        nn.Linear(8, 3),
    )


def recorded(pipe: Pipe, x: torch.Tensor, y: torch.Tensor | None):
    with pipe.record() as timeline:
        (pipe(x).sum() if y is None else pipe(x, target=y)).backward()
    return timeline


def in_four_stages(schedule: str, checkpoint: str) -> Pipe:
    workers = 4 // SCHEDULES[schedule].stages_per_worker
    return Pipe(
        model(), 6, checkpoint, balance=[2] * 4, devices=["cpu"] * workers, schedule=schedule,
        loss_fn=functional.cross_entropy,
    )  # fmt: skip


every_schedule = pytest.mark.parametrize("schedule", [name for name in WAYS if name != "outside"])


@skippable(pop=["skip"])
class Joined(nn.Module):
    """Its graph saves neither of the tensors."""

    def forward(self, x: torch.Tensor):
        return torch.cat([x, (yield pop("skip"))], dim=1)


def test_popped_tensors_and_what_waits_count() -> None:
    joined = nn.Sequential(nn.Linear(4, 8), Down(8, 8), nn.Linear(8, 8), nn.Tanh(), Joined(), nn.Linear(16, 3))
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(432, 3)
    )
    for layers, x in ((joined, torch.randn(192, 4)), (convolutions, torch.randn(16, 3, 16, 16))):
        pipe = Pipe(
            layers, 4, "never", balance=[2] * 3, devices=["cpu"] * 3, schedule="zb-h1",
            loss_fn=functional.cross_entropy,
        )  # fmt: skip
        y = torch.randint(3, (len(x),))
        prediction = pipe.predict(x, target=y, timeout=0)
        pipe(x, target=y)
        costs = recorded(pipe, x, y).costs()
        assert prediction.costs.activation == costs.activation
        assert costs.waiting is not None
        assert list(prediction.costs.waiting) == pytest.approx(list(costs.waiting), rel=0.05)


@every_schedule
def test_activation_bytes_are_those_that_are_then_measured(schedule: str, checkpoint: str) -> None:
    pipe = in_four_stages(schedule, checkpoint)
    x, y = torch.randn(192, 4), torch.randint(3, (192,))
    prediction = pipe.predict(x, target=y, timeout=0)
    pipe(x, target=y)  # the first micro-batch of a pipe shows what can wait, and puts nothing off
    timeline = recorded(pipe, x, y)
    measured = timeline.timeline()
    peaks = [measured.peak_memory(worker) for worker in range(measured.workers)]
    assert list(prediction.simulation.peak_memory) == pytest.approx(peaks, rel=0.05)
    costs = timeline.costs()
    assert list(prediction.costs.activation) == pytest.approx(list(costs.activation), rel=0.05)
    if prediction.costs.waiting is not None:
        assert list(prediction.costs.waiting) == pytest.approx(list(costs.waiting or ()), rel=0.05)
    # What is recorded predicts its own peak, with what waits for weights.
    assert list(timeline.predicted().peak_memory) == pytest.approx(peaks, rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "offload"),
    [("gpipe", "never", "activations"), ("gpipe", "except_last", 1), ("1f1b", "never", 2), ("zb-h1", "never", 1)],
)
def test_what_is_in_host_memory_does_not_count_as_activations(
    schedule: str, checkpoint: str, offload: int | str
) -> None:
    plain = in_four_stages(schedule, checkpoint)
    # Of several threads one may still hold a value that it has sent, at the O of the next stage, and so less moves.
    pipe = Pipe(
        model(), 6, checkpoint, balance=[2] * 4, devices=plain.devices, schedule=schedule,
        loss_fn=functional.cross_entropy, offload=offload, debug="one_thread",
    )  # fmt: skip
    x, y = torch.randn(192, 4), torch.randint(3, (192,))
    less, prediction = (each.predict(x, target=y, timeout=0) for each in (plain, pipe))
    assert sum(prediction.simulation.peak_memory) < sum(less.simulation.peak_memory)
    pipe(x, target=y)
    measured = recorded(pipe, x, y).timeline()
    peaks = [measured.peak_memory(worker) for worker in range(measured.workers)]
    assert list(prediction.simulation.peak_memory) == pytest.approx(peaks, rel=0.05)
    hosts = [device.host_memory.reserved for device in pipe._executor.engine_in_use().devices.values()]
    assert list(prediction.host_bytes) == hosts
    table, _, at_once, host = str(prediction).rsplit("\n", 3)
    assert table.splitlines()[1].split()[-1] == "offloads"
    assert at_once.startswith("at most ")
    assert host == f"in host memory: {sum(hosts) / 1024:.1f} KiB"


def test_host_memory_counts_on_the_meta_device() -> None:
    pipe = Pipe(
        model().to("meta"), 6, "never", balance=[2] * 4, devices=["meta"] * 2, schedule="interleaved-1f1b",
        loss_fn=functional.cross_entropy, offload="activations",
    )  # fmt: skip
    x, y = torch.randn(192, 4, device="meta"), torch.zeros(192, dtype=torch.int64, device="meta")
    prediction = pipe.predict(x, target=y, timeout=0)
    pipe(x, target=y).backward()
    hosts = [device.host_memory.reserved for device in pipe._executor.engine_in_use().devices.values()]
    assert all(hosts)
    assert all(prediction.host_bytes)
    assert "in host memory" in str(prediction)


def test_the_loss_may_be_outside() -> None:
    pipe = Pipe(model(), 6, balance=[4, 4], devices=["cpu"] * 2)
    x = torch.randn(192, 4)
    prediction = pipe.predict(x, timeout=0)
    measured = recorded(pipe, x, None).timeline()
    assert prediction.simulation.peak_memory == pytest.approx(
        (measured.peak_memory(0), measured.peak_memory(1)), rel=0.05
    )


def test_fixed_bytes_and_the_table() -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2).requires_grad_(False))
    pipe = Pipe(layers, 3, "never", balance=[2, 1], devices=["cpu"] * 2)
    prediction = pipe.predict(torch.randn(6, 4), timeout=0)
    first, second = prediction.stages
    assert (first.weights, first.gradients, first.buffers) == (4 * (32 + 8 + 16), 4 * (32 + 8 + 16), 4 * 16 + 8)
    assert (second.weights, second.gradients, second.buffers) == (4 * 18, 0, 0)
    assert prediction.worker_bytes == tuple(stage.total for stage in prediction.stages)
    assert prediction.seconds > 0
    heading, titles, *rows, last, at_once = str(prediction).splitlines()
    assert heading == "predicted: gpipe, 2 workers, 3 micro-batches"
    assert titles.split() == ["stage", "device", "weights", "gradients", "buffers", "activations", "total"]
    assert len(rows) == 2
    assert last.startswith("step ")
    assert at_once == f"at most {prediction.device_bytes[torch.device('cpu')] / 1024:.1f} KiB on cpu at once"


def test_nothing_changes() -> None:
    pipe = Pipe(model(), 4, balance=[4, 4], devices=["cpu"] * 2, deferred_batch_norm=True)
    pipe[3].eval()
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    flags = [module.training for module in pipe.modules()]
    x = torch.randn(12, 4, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with torch.no_grad():
            state = torch.get_rng_state()
            pipe.predict(x, timeout=0)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())
    assert [module.training for module in pipe.modules()] == flags
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert x.grad is None


def test_inputs_and_targets_that_are_overwritten_stay_as_they_are() -> None:
    """Whole stages begin with a layer in place; neither the batch nor what the stage before hands on is changed."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.mul_(0.5)
        return (output - target).square().mean()

    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    pipe = Pipe(module, 2, "never", balance=[2, 2], devices=["cpu", "cpu"], loss_fn=loss)
    batch, target = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]), torch.ones(2, 2)
    pipe.predict(batch, target=target, timeout=0.01)
    assert batch.tolist() == [[-1, 1], [1, -1]]
    assert torch.equal(target, torch.ones(2, 2))


def test_a_skip_may_be_overwritten() -> None:
    seen = []

    @skippable(stash=["a"])
    class Fork(nn.Linear):
        def forward(self, x):
            yield stash("a", x * self.weight.sum())
            return x

    @skippable(pop=["a"])
    class Join(nn.Module):
        def forward(self, x):
            a = yield pop("a")
            a += x
            seen.append(a.detach().clone())
            return a

    pipe = Pipe(nn.Sequential(Fork(2, 2), Join()), 2, balance=[1, 1], devices=["cpu"] * 2)
    pipe.predict(torch.ones(4, 2), timeout=0.01)
    assert len(seen) > 1
    assert all(torch.equal(other, seen[0]) for other in seen)


def test_progress_is_reported_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    pipe = Pipe(model(), 4, balance=[4, 4], devices=["cpu"] * 2)
    lines: list[str] = []
    pipe.predict(torch.randn(12, 4), timeout=0, progress=lines.append)
    with caplog.at_level("INFO", logger="pipework"):
        pipe.predict(torch.randn(12, 4), timeout=0)
    for said in (lines, [record.message for record in caplog.records]):
        assert [line.split(":")[0] for line in said] == ["stage 1 of 2", "stage 2 of 2"]
    with pytest.raises(TypeError, match="inputs do not have any tensors"):
        pipe.predict(5)
    with pytest.raises(ValueError, match="without layers"):
        Pipe(nn.Sequential()).predict(torch.ones(1))


def test_layers_are_called_as_the_pipe_calls_them() -> None:
    @dataclass
    class Pair:
        first: torch.Tensor
        second: torch.Tensor

    class Make(nn.Module):
        def forward(self, x: torch.Tensor) -> Pair:
            return Pair(x, x * 2)

    class Use(nn.Module):
        def forward(self, pair: Pair) -> torch.Tensor:
            return pair.first + pair.second

    class Wrap(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (x,)

    for module in (
        nn.Sequential(nn.Linear(4, 4), Make(), Use(), nn.Linear(4, 4)),
        PipeSequential(nn.Linear(4, 4), Wrap(), nn.Tanh(), nn.Linear(4, 4)),
    ):
        pipe = Pipe(module, 2, "never", balance=[2, 2], devices=["cpu"] * 2, loss_fn=functional.mse_loss)
        x = torch.randn(8, 4)
        prediction = pipe.predict(x, target=x, timeout=0)
        costs = recorded(pipe, x, x).costs()
        assert (prediction.costs.activation, prediction.costs.message) == (costs.activation, costs.message)
        pipe.zero_grad()
        assert sum(balance_by_time(2, module, x[:4], timeout=0)) == 4
        assert sum(balance_by_size(2, module, x, chunks=2)) == 4


# ---- what a device holds at once -------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a perceptron, of operators that every device has."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, words, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(rows, words, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
        x = x + self.out(attention.transpose(1, 2).reshape(rows, words, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def convolutions(channels: int, between: int) -> nn.Sequential:
    """Four layers of two convolutions; so many channels go from one layer to the next."""
    return nn.Sequential(
        *(nn.Sequential(convolution(between if n else 3, channels), convolution(channels, between)) for n in range(4))
    )


def convolution(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU())


@skippable(stash=["skip"])
class Contract(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.body = nn.Sequential(convolution(inner, outer), convolution(outer, outer))
        self.down = nn.Conv2d(outer, outer, 2, 2)

    def forward(self, x: torch.Tensor):
        x = self.body(x)
        yield stash("skip", x)
        return self.down(x)


@skippable(pop=["skip"])
class Expand(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(channels, channels, 1)
        self.body = nn.Sequential(convolution(2 * channels, channels), convolution(channels, channels))

    def forward(self, x: torch.Tensor):
        skip = yield pop("skip")
        x = self.narrow(x).repeat_interleave(2, -1).repeat_interleave(2, -2)
        return self.body(torch.cat([x, skip], 1))


def unet(channels: int) -> nn.Sequential:
    """Skips go from the first layer to the last, and between the two in the middle."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Contract(3, channels).isolate(outer),
        Contract(channels, channels).isolate(inner),
        Expand(channels).isolate(inner),
        Expand(channels).isolate(outer),
    )


MODELS = {
    "mlp": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(4))),
        (512, 256),
    ),
    "transformer": (lambda: nn.Sequential(*(Block(128) for _ in range(4))), (32, 32, 128)),
    "convolutions": (lambda: convolutions(32, 32), (32, 3, 16, 16)),
    # With small messages: while activations are in host memory, a message of the model above is 5% of what a device
    # holds, and how many wait at once depends on the times that were measured.
    "bottlenecks": (lambda: convolutions(32, 4), (32, 3, 16, 16)),
    "unet": (lambda: unet(128), (8, 3, 8, 8)),
}
PLACES = {"one each": (0, 1), "both on one": (0, 0), "alone": (0,)}
OPTIMIZERS = {
    "none": None,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "momentum, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, foreach=False),
    "adam, foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "adam on the host": lambda parameters: HostOptimizer(parameters, torch.optim.Adam, fused=True),
}


def predicted_and_counted(
    kind: str, schedule: str, checkpoint: str, place: str, optimizer_of: Any, *, offload: bool | int | str = False
) -> dict[torch.device, float]:
    """For each device, what was predicted as a multiple of what the device's allocator then counts in a step.

    The least of three steps: where the machine interrupts one worker, the messages of the others wait in its memory,
    and each is about 1% of what the device holds. What stays when the pipe is gone does not count: a library keeps it
    for each thread and stream, as cuBLAS does, so that it depends on what the process has done before.
    """
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    if max(PLACES[place]) >= torch.accelerator.device_count():
        pytest.skip("needs two accelerators")
    make, shape = MODELS[kind]
    devices = [torch.device(accelerator.type, index) for index in PLACES[place]]
    stages = len(devices) * SCHEDULES[schedule].stages_per_worker
    gc.collect()
    before = {device: torch.accelerator.memory_allocated(device) for device in devices}
    pipe = Pipe(
        make(), 8, checkpoint, balance=[4 // stages] * stages, devices=devices, schedule=schedule,
        loss_fn=functional.mse_loss, offload=offload,
    )  # fmt: skip
    x = torch.randn(shape).to(pipe.input_device)
    with torch.no_grad():
        y = torch.zeros_like(copy.deepcopy(pipe)(x))
    gc.collect()
    optimizer = optimizer_of and optimizer_of(pipe.parameters())
    prediction = pipe.predict(x, target=y, optimizer=optimizer, timeout=0.1)
    if isinstance(optimizer, HostOptimizer):
        assert sum(prediction.host_bytes) == 2 * sum(stage.weights for stage in prediction.stages)
        assert "\nin host memory: " in str(prediction)
    peaks: dict[torch.device, list[int]] = {device: [] for device in devices}
    for _ in range(5):
        for device in devices:
            torch.accelerator.reset_peak_memory_stats(device)
        pipe(x, target=y).backward()
        if optimizer is not None:
            optimizer.step()
        pipe.zero_grad()
        for device in peaks:
            peaks[device].append(torch.accelerator.max_memory_allocated(device) - before[device])
    del pipe, optimizer, x, y
    gc.collect()
    kept = {device: torch.accelerator.memory_allocated(device) - before[device] for device in devices}
    if accelerator.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    left = {device: torch.accelerator.memory_allocated(device) - before[device] for device in devices}
    assert all(size <= 0 for size in left.values()), f"nothing else stays: {left}"
    # The first two steps make the state of the optimizer, and the gradients.
    return {device: prediction.device_bytes[device] / (min(peak[2:]) - kept[device]) for device, peak in peaks.items()}


CASES = [
    ("mlp", "gpipe", "never", "one each", "adam, foreach"),
    ("mlp", "1f1b", "except_last", "one each", "momentum"),
    ("mlp", "zb-h1", "never", "one each", "adam, foreach"),
    ("mlp", "gpipe", "always", "both on one", "adam on the host"),
    ("mlp", "zb-v", "always", "one each", "momentum, foreach"),
    ("transformer", "gpipe", "never", "one each", "adam, foreach"),
    ("transformer", "1f1b", "always", "one each", "adam"),
    ("transformer", "interleaved-1f1b", "never", "both on one", "adam, foreach"),
    ("transformer", "interleaved-1f1b", "except_last", "one each", "none"),
    ("convolutions", "gpipe", "never", "both on one", "adam, foreach"),
    ("convolutions", "1f1b", "never", "one each", "adam, foreach"),
    ("convolutions", "gpipe", "always", "alone", "adam, foreach"),
    ("unet", "1f1b", "never", "one each", "none"),
    ("unet", "zb-v", "always", "one each", "adam"),
    ("unet", "zb-h1", "except_last", "one each", "momentum, foreach"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "schedule", "checkpoint", "place", "optimizer"), CASES)
def test_what_a_device_holds_is_what_it_then_counts(
    kind: str, schedule: str, checkpoint: str, place: str, optimizer: str
) -> None:
    for ratio in predicted_and_counted(kind, schedule, checkpoint, place, OPTIMIZERS[optimizer]).values():
        assert ratio == pytest.approx(1, abs=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "schedule", "checkpoint", "place", "offload"),
    [
        ("mlp", "gpipe", "never", "one each", 1),
        ("transformer", "gpipe", "never", "alone", 2),
        ("transformer", "gpipe", "always", "one each", 1),
        ("bottlenecks", "interleaved-1f1b", "never", "one each", 1),
        ("bottlenecks", "zb-v", "never", "one each", "activations"),
        ("bottlenecks", "gpipe", "always", "one each", 1),
    ],
)
def test_what_a_device_holds_while_activations_are_in_host_memory(
    kind: str, schedule: str, checkpoint: str, place: str, offload: int | str
) -> None:
    for ratio in predicted_and_counted(kind, schedule, checkpoint, place, None, offload=offload).values():
        assert ratio == pytest.approx(1, abs=0.05)


@pytest.mark.usefixtures("recorded_graphs")
def test_what_graphs_add_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()  # both predictions measure equal times, on which it depends what is in flight at once
    monkeypatch.setattr(stage_copy, "now", lambda device: float(next(ticks)))
    layers, x, y = model(), torch.randn(192, 4), torch.randint(3, (192,))
    options = {"schedule": "1f1b", "devices": ["cpu"] * 2, "balance": [4, 4], "loss_fn": functional.cross_entropy}
    plain, pipe = (Pipe(copy.deepcopy(layers), 6, "never", **options, graphs=graphs) for graphs in (False, True))
    before, after = (each.predict(x, target=y, timeout=0) for each in (plain, pipe))
    for _ in range(5):
        pipe(x, target=y)
    replayed = recorded(pipe, x, y).timeline()
    assert pipe.graphs is not None
    assert pipe.graphs.replayed == 1
    peaks = [replayed.peak_memory(worker) for worker in (0, 1)]
    assert list(after.simulation.peak_memory) == pytest.approx(peaks, rel=0.05)
    assert [each.gradients for each in after.stages] == [2 * each.gradients for each in before.stages]
    gradients, in_flight = sum(each.gradients for each in before.stages), 2 * 32 * 4 * 4 + 32 * 8
    cpu = torch.device("cpu")
    assert after.device_bytes[cpu] - before.device_bytes[cpu] == gradients + in_flight
    # Without a target nothing is captured.
    outside = Pipe(layers, 6, devices=["cpu"], graphs=True)
    assert outside.predict(x, timeout=0).stages[0].gradients == sum(each.weights for each in before.stages)


def test_the_state_of_an_optimizer_on_the_host_counts_there() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("meta")
    pipe = Pipe(layers, 2, balance=[1, 1], devices=["meta"] * 2, loss_fn=functional.mse_loss)
    x, optimizer = torch.randn(4, 8, device="meta"), HostOptimizer(pipe.parameters(), torch.optim.AdamW)
    prediction = pipe.predict(x, target=x, optimizer=optimizer, timeout=0)
    assert [stage.optimizer for stage in prediction.stages] == [0, 0]
    assert list(prediction.host_bytes) == [2 * stage.weights for stage in prediction.stages]
    with pytest.raises(TypeError, match=r"optimizer is <class .*: wanted an optimizer of the pipe's parameters"):
        pipe.predict(x, target=x, optimizer=HostOptimizer, timeout=0)
    with pytest.raises(ValueError, match="the numbers of the optimizer have -2: wanted finite numbers of at least 0"):
        pipe.predict(x, target=x, optimizer=-2)
    with pytest.raises(ValueError, match="the seconds of timeout= have '1': wanted finite numbers"):
        pipe.predict(x, target=x, timeout="1")


def test_the_optimizers_state_counts() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), 2, balance=[1, 1], devices=["cpu"] * 2)
    x = torch.randn(4, 256)
    without, adam, two = (
        pipe.predict(x, optimizer=optimizer, timeout=0) for optimizer in (None, torch.optim.Adam(pipe.parameters()), 2)
    )
    assert [stage.optimizer for stage in adam.stages] == [2 * stage.weights for stage in without.stages]
    assert adam.stages == two.stages
    cpu = torch.device("cpu")
    assert two.device_bytes[cpu] - without.device_bytes[cpu] == sum(2 * stage.weights for stage in two.stages)
    assert adam.device_bytes[cpu] > two.device_bytes[cpu]  # with so few rows, the optimizer's step needs most
    assert "optimizer" in str(adam)
    assert "optimizer" not in str(without)
