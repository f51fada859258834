"""Programs whose numbers depend on the order of streams, on when memory is reused, or on who moves a generator."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import HostOptimizer, Pipe, pop, skippable, stash
from pipework.runtime.graphs import captured_steps
from pipework.runtime.random import unseen_draws
from pipework.runtime.random.kernels import DeviceGenerator
from pipework.runtime.random.shards import drawing_for_shard
from pipework.schedule import Schedule, from_csv
from tests.accelerator.gate import closed_gate, wait_at
from tests.runtime.graphs.recorded import RecordedGraphs

WIDTH = 16


@skippable(stash=["skip"])
class Stash(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        yield stash("skip", y)
        return y.tanh()


@skippable(pop=["skip"])
class Pop(nn.Linear):
    def forward(self, x):
        skip = yield pop("skip")
        return super().forward(x) + skip


class Sends(nn.Module):
    """Sets an event in its last forward, when the results of all earlier ones have been sent."""

    def __init__(self, micro_batches):
        super().__init__()
        self.left = micro_batches
        self.sent = threading.Event()

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            self.sent.set()
        return x


class Fails(nn.Module):
    """Raises an error in its first forward, when later micro-batches are on their way to it."""

    def __init__(self, sent):
        super().__init__()
        self.sent = sent
        self.has_failed = False

    def forward(self, x):
        if not self.has_failed:
            self.has_failed = True
            assert self.sent.wait(10)
            raise ArithmeticError("on purpose")
        return x


class Waits(nn.Module):
    """Launches a kernel that ends when a gate is opened."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def forward(self, x):
        wait_at(x.detach(), self.gate)
        return x


class Moves(nn.Module):
    """Puts its input onto a device by itself."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def forward(self, x):
        return x.to(self.device, non_blocking=True)


class Replaces(nn.Module):
    """Replaces its buffer in each forward: then nothing but a kernel on its way needs the first one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        y = x + self.mean
        self.mean = 0.5 * self.mean + x.detach()[0]
        return y


@contextlib.contextmanager
def met(here, there):
    """Inside, another thread is as far, if it came within a moment."""
    here.set()
    there.wait(0.05)
    yield
    here.clear()


class Meet(torch.autograd.Function):
    """Draws in forward and backward, after it has waited a moment for the other worker to be as far."""

    @staticmethod
    def forward(ctx, x, here, there):
        ctx.here, ctx.there = here, there
        return x * Meet.draw(x, here, there)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Meet.draw(gradient, ctx.here, ctx.there), None, None

    @staticmethod
    def draw(x, here, there):
        with met(here, there):
            return torch.rand_like(x)


class Waiting(nn.Dropout):
    """A dropout that has waited a moment for that of another thread to be as far."""

    def __init__(self, here, there):
        super().__init__(0.5)
        self.here, self.there = here, there

    def forward(self, x):
        with met(self.here, self.there):
            return super().forward(x)


class Meets(nn.Module):
    def __init__(self, here, there):
        super().__init__()
        self.here, self.there = here, there

    def forward(self, x):
        return Meet.apply(x, self.here, self.there)


def model(dropout: float = 0.3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Stash(WIDTH, WIDTH),
        nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)),
        Pop(WIDTH, WIDTH),
    )


def train(
    devices: Sequence[str],
    schedule: str | Schedule,
    checkpoint: str,
    *,
    inside: bool = True,
    factor: float = 1.0,
    deferred: bool = False,
    one_thread: bool = False,
    offload: str | bool = False,
) -> list[Tensor]:
    """Some steps with inputs that the caller's stream makes just before, and overwrites just after."""
    pipe = Pipe(
        model(), 4, checkpoint, balance=[4 // len(devices)] * len(devices), devices=devices, schedule=schedule,
        loss_fn=functional.mse_loss, deferred_batch_norm=deferred, debug="one_thread" if one_thread else (),
        offload=offload,
    )  # fmt: skip
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, foreach=True)
    first, last = "sim:0" if devices[0] == "cpu" else devices[0], devices[-1]
    results = []
    for step in range(3):
        numbers = torch.full((8, WIDTH), 0.25 * (step + 1), device=first)
        x = (numbers * 2).cumsum(0).requires_grad_()
        y = torch.full((8, WIDTH), 0.5, device=last).cumsum(1)
        if inside:
            loss = pipe(x, target=y)
        else:
            output = pipe(x)
            loss = functional.mse_loss(output, y)
            results.append(output.detach().clone())
        (loss * factor).backward(retain_graph=step == 1)
        results += [loss.detach().clone(), x.grad.clone()]
        if step == 1:
            loss.backward()
        results += [parameter.grad * 2 for parameter in pipe.parameters()]
        with torch.no_grad():
            x.fill_(torch.nan)
            y.fill_(torch.nan)
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return [*results, *(buffer.clone() for buffer in pipe.buffers())]


def with_early_loads(stages: int) -> Schedule:
    """Each L follows its O, which may be under way, and each O follows an L, whose buffers it must not use yet."""
    order = ["F0", "F1", "F2", "F3", "O0", "L0", "O1", "L1", "O2", "L2", "O3", "L3", "B0", "B1", "B2", "B3"]
    return from_csv("\n".join(",".join(f"{stage}{each}" for each in order) for stage in range(stages)), name="own")


def call_on_own_streams(devices: Sequence[str]) -> list[Tensor]:
    """Calls on streams of the caller's own, and goes backward on others, with a factor that is computed late."""
    pipe = Pipe(model(), 4, balance=[2, 2], devices=devices, schedule="1f1b", loss_fn=functional.mse_loss)
    x, y = torch.full((8, WIDTH), 0.5, device=devices[0]).cumsum(0), torch.ones(8, WIDTH, device=devices[1])
    streams = [torch.Stream(device) for device in devices if device != "cpu"]
    with contextlib.ExitStack() as current:
        for stream in streams:
            stream.wait_stream(torch.accelerator.current_stream(stream.device))
            current.enter_context(stream)
        loss = pipe(x, target=y)
        scaled = loss * torch.full((1024, 1024), 2.0**-10, device=devices[1]).cumsum(0)[-1, 0]
    for stream in streams:
        torch.accelerator.current_stream(stream.device).wait_stream(stream)
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # it is what is wanted here
    try:
        scaled.backward()
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
    return [loss.detach(), *(parameter.grad for parameter in pipe.parameters())]


def replay_on_own_streams(devices: Sequence[str]) -> list[Tensor]:
    """Captured steps, each called on other streams of the caller's, with another weight of its losses."""
    results = []
    made = mock.Mock(side_effect=lambda _: RecordedGraphs())
    with mock.patch.multiple(captured_steps, can_capture=mock.Mock(return_value=True), Graphs=made):
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        pipe = Pipe(
            layers, 4, balance=[1, 1], devices=devices, schedule="1f1b", loss_fn=functional.mse_loss, graphs=True
        )
        for step in range(8):
            streams = [torch.Stream(device) for device in dict.fromkeys(devices)]
            with contextlib.ExitStack() as current:
                for stream in streams:
                    current.enter_context(stream)
                x = torch.full((8, WIDTH), 0.25 * (step + 1), device=devices[0]).cumsum(0)
                y = torch.ones(8, WIDTH, device=devices[1])
                loss = pipe(x, target=y, loss_scale=1.0 + step)
                loss.backward()
                results += [loss.detach().clone(), *(parameter.grad.clone() for parameter in pipe.parameters())]
                pipe.zero_grad()
                del loss
        assert pipe.graphs.replayed == 3
    for device in dict.fromkeys(devices):
        torch.accelerator.synchronize(device)
    return results


def fail(devices: Sequence[str]) -> list[Tensor]:
    """A mini-batch that fails; then its inputs and parameters are overwritten, and another one is run."""
    sends = Sends(4)
    layers = nn.Sequential(sends, Fails(sends.sent), *model())
    pipe = Pipe(layers, 4, balance=[1, 5], devices=devices)
    for attempt in range(2):
        x = torch.full((8, WIDTH), 0.5, device=devices[0]).cumsum(0)
        try:
            output = pipe(x)
        except ArithmeticError:
            assert attempt == 0
        with torch.no_grad():
            x.fill_(torch.nan)
            for parameter in pipe.parameters():
                parameter.mul_(0.5)
    return [output.detach()]


def record() -> list[Tensor]:
    """A recorded step: a gate holds up the second device before it, and another one the kernels of the first."""
    with closed_gate() as (before, opens_before), closed_gate() as (inside, opens_inside):
        pipe = Pipe(
            nn.Sequential(Waits(inside), nn.Linear(WIDTH, WIDTH)), 2, balance=[1, 1], devices=["sim:0", "sim:1"]
        )
        x = torch.ones(8, WIDTH, device="sim:0")
        wait_at(torch.ones(1, device="sim:1"), before)

        def open_later() -> None:
            # Meanwhile whoever takes a time too early takes that of another moment.
            for opens in (opens_before, opens_inside):
                time.sleep(1.0)
                opens.set()

        opener = threading.Thread(target=open_later)
        opener.start()
        with torch.no_grad(), pipe.record() as recording:
            pipe(x)
        opener.join()
    at = {(event.action.stage, event.action.micro_batch): event for event in recording.timeline().intervals}
    in_order = [at[1, micro_batch].start > at[0, micro_batch].end - 0.5 for micro_batch in range(2)]
    return [torch.tensor(in_order)]


def evaluate(devices: Sequence[str]) -> list[Tensor]:
    """Outputs without gradients, of inputs from a stream of the caller's own."""
    pipe = Pipe(model(), 4, balance=[2, 2], devices=devices)
    results = []
    with torch.no_grad(), torch.Stream(devices[0]), torch.Stream(devices[-1]):
        for step in range(4):
            x = torch.full((8, WIDTH), 0.5 + step, device=devices[0]).cumsum(0)
            output = pipe(x)
            x.zero_()
            results.append(output * 2)
            del output
    torch.accelerator.synchronize(devices[-1])
    return results


def move() -> list[Tensor]:
    """A stage whose last layer has already put its output onto the device of the next stage."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Moves("sim:1"), nn.Linear(WIDTH, WIDTH))
    pipe = Pipe(layers, 4, balance=[2, 1], devices=["sim:0", "sim:1"])
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(0.5)
        return [pipe(torch.ones(8, WIDTH, device="sim:0"))]


def replace_buffers() -> list[Tensor]:
    """Layers replace buffers that the caller's stream has allocated, also those that the caller has put there."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Replaces(), nn.Linear(WIDTH, WIDTH), Replaces())
    pipe = Pipe(layers, 4, "never", balance=[2, 2], devices=["sim:0", "sim:1"])
    for _ in range(2):
        output = pipe(torch.ones(8, WIDTH, device="sim:0"))
        output.sum().backward()
        returned = [output.detach(), *pipe.buffers()]
        for layer in (pipe[1], pipe[3]):
            layer.mean = torch.full_like(layer.mean, 0.25)
    return [*returned, *(parameter.grad for parameter in pipe.parameters())]


def draw_at_the_same_time() -> list[Tensor]:
    """Two workers on one device whose layers draw; afterwards the caller draws."""
    one, other = threading.Event(), threading.Event()
    layers = nn.Sequential(Meets(one, other), Meets(other, one))
    pipe = Pipe(layers, 2, "never", balance=[1, 1], devices=["sim:0", "sim:0"])
    torch.get_device_module("sim").manual_seed_all(5)
    x = torch.ones(4, WIDTH, device="sim:0", requires_grad=True)
    output = pipe(x)
    output.sum().backward()
    return [output.detach(), x.grad, torch.rand(4, device="sim:0")]


def draw_on_two_threads() -> list[Tensor]:
    """Two pipes on one device, called from two threads, each with one worker; afterwards the caller draws.

    Which numbers they draw is left to chance. But those of a recomputation are those of the first pass, so that the
    gradient is what the output is of the input.
    """
    one, other = threading.Event(), threading.Event()
    torch.get_device_module("sim").manual_seed_all(5)
    wrong: list[int] = []

    def steps(here: threading.Event, there: threading.Event) -> None:
        pipe = Pipe(nn.Sequential(Waiting(here, there), nn.Dropout(0.5)), 2, "always", balance=[2], devices=["sim:0"])
        for _ in range(2):
            x = torch.full((8, WIDTH), 0.5, device="sim:0").requires_grad_()
            output = pipe(x)
            output.sum().backward()
            wrong.append(int((output != x.grad * x).sum()))

    with ThreadPoolExecutor(2) as threads:
        for call in [threads.submit(steps, one, other), threads.submit(steps, other, one)]:
            call.result()
    return [torch.tensor(wrong), torch.rand(4, device="sim:0")]


def draw_between() -> list[Tensor]:
    """What the caller draws on a device before and after a pipe; a layer calls another pipe and draws afterwards."""
    inner = Pipe(model().requires_grad_(False), 2, balance=[2, 2], devices=["sim:0", "sim:0"])

    class Calls(nn.Module):
        def forward(self, x):
            before = torch.rand_like(x)
            return inner(x) + before + torch.rand_like(x)

    pipe = Pipe(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls()), 2, "always", balance=[1, 1], devices=["sim:0", "sim:0"]
    )
    torch.manual_seed(1)
    torch.get_device_module("sim").manual_seed_all(5)
    draws = [torch.rand(4, device="sim:0")]
    output = pipe(torch.ones(8, WIDTH, device="sim:0"))
    draws.append(torch.rand(4, device="sim:0"))
    output.sum().backward()
    draws.append(torch.rand(4, device="sim:0"))
    return [output.detach(), *draws, *(parameter.grad for parameter in pipe.parameters())]


def draw_for_shards() -> list[Tensor]:
    """A layer draws for a shard between numbers that all ranks of a layer group draw alike."""

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with drawing_for_shard(1):
                of_shard = torch.rand_like(x)
            return x * torch.rand_like(x) + of_shard

    pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Draws()), 2, "always", devices=["sim:0"])
    torch.manual_seed(1)
    output = pipe(torch.ones(8, WIDTH, device="sim:0"))
    output.sum().backward()
    return [output.detach(), *(parameter.grad for parameter in pipe.parameters())]


class _NumbersOfExtension(torch.autograd.Function):
    """Draws forward and backward by a kernel that PyTorch's dispatcher does not know."""

    @staticmethod
    def numbers(x: Tensor) -> Tensor:
        generator = torch.get_device_module("sim").default_generators[x.device.index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + 1)
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(seed % 2**32 + offset)).to(x.device)

    @staticmethod
    def forward(ctx, x):
        return x + _NumbersOfExtension.numbers(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * _NumbersOfExtension.numbers(gradient)


def draw_unseen() -> list[Tensor]:
    """Two workers of one device with layers that draw by an extension, forward and backward; then the caller draws."""

    class Extension(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(_NumbersOfExtension.apply(x), 0.5)

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Extension(), nn.Linear(WIDTH, WIDTH), Extension()).to("sim:0")
    pipe = Pipe(layers, 2, "always", balance=[2, 2], devices=["sim:0", "sim:0"])
    results = []
    for step in range(6):  # also after the first ones, in which every worker holds the generator
        torch.manual_seed(step)
        pipe.zero_grad()
        output = pipe(torch.ones(8, WIDTH, device="sim:0"))
        output.sum().backward()
        results += [output.detach(), *(parameter.grad for parameter in pipe.parameters())]
    return [*results, torch.rand(4, device="sim:0")]


def begin_to_seed() -> list[Tensor]:
    """A layer seeds the generator of its device, which its worker does not hold: an error. Then the caller draws."""

    class Seeds(nn.Module):
        def forward(self, x):
            torch.get_device_module("sim").default_generators[0].manual_seed(3)
            return x

    pipe = Pipe(nn.Sequential(Seeds(), nn.Linear(WIDTH, WIDTH)), 2, balance=[1, 1], devices=["sim:0", "sim:0"])
    with contextlib.suppress(RuntimeError):
        pipe(torch.ones(8, WIDTH, device="sim:0"))
    return [torch.rand(4, device="sim:0")]


def not_held(scenario: Callable[[], list[Tensor]]) -> list[Tensor]:
    """As in later mini-batches, in which workers do not hold the generator of their device."""
    with mock.patch.object(unseen_draws, "LOOKS", 0):
        return scenario()


def seed_without_default_generators() -> list[Tensor]:
    """A device whose module has functions for the state of its generator, and no generators, as `torch.mps`."""
    module = torch.get_device_module("sim")
    generators = vars(module).pop("default_generators")
    try:
        generator = DeviceGenerator(torch.device("sim:0"))
        before = generator.get()
        generator.set(generator.seeded(3))
        drawn = [torch.rand(4, device="sim:0")]
        generator.set(before)
        return [*drawn, torch.tensor(before)]
    finally:
        module.default_generators = generators


def step_on_the_host() -> list[Tensor]:
    """Steps of an optimizer whose state is on the host; gradients are computed just before, and freed just after."""
    parameters = [nn.Parameter(torch.full((WIDTH, WIDTH), 0.5, device=f"sim:{number}")) for number in (0, 1, 0)]
    optimizer = HostOptimizer(parameters, torch.optim.AdamW, lr=0.1, fused=True)
    results = []
    for step in range(3):
        for parameter in parameters:
            (parameter.cumsum(step % 2) * parameter).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        results += [(parameter.detach() * 2).cumsum(0) for parameter in parameters]
    return results


def step_in_backward() -> list[Tensor]:
    """Steps that begin while another stage computes; the factor of the loss is there late."""
    devices = ["sim:0", "sim:1", "sim:0"]
    pipe = Pipe(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), 4, balance=[1] * 3, devices=devices,
        schedule="zb-h1", checkpoint="never", loss_fn=functional.mse_loss,
    )  # fmt: skip
    optimizer = HostOptimizer(pipe.parameters(), torch.optim.AdamW, lr=0.1, fused=True)
    x = torch.full((8, WIDTH), 0.5, device="sim:0").cumsum(0)
    results = []
    for _ in range(3):
        with optimizer.step_in_backward(pipe):
            pipe(x, target=x.detach().tanh()).backward()
            assert optimizer._early._jobs
        results += [parameter.grad * 2 for parameter in pipe.parameters()]
        optimizer.zero_grad()
        results += [(parameter.detach() * 2).cumsum(0) for parameter in pipe.parameters()]
    return results


SCENARIOS: dict[str, Callable[[], list[Tensor]]] = {
    "loss outside, two devices": lambda: train(["sim:0", "sim:1"], "gpipe", "always", inside=False),
    "loss inside, two workers on one device": lambda: train(["sim:0", "sim:0"], "1f1b", "except_last"),
    "halves of backwards, three devices and the CPU": lambda: train(
        ["sim:1", "cpu", "sim:0", "sim:2"], "zb-h1", "never", factor=0.5
    ),
    "the CPU first and last": lambda: train(["cpu", "sim:1", "sim:0", "cpu"], "1f1b", "always", factor=0.5),
    "a gradient of the loss, and deferred batch norm": lambda: train(
        ["sim:0", "sim:1"], "1f1b", "never", factor=0.5, deferred=True
    ),
    "one thread for three devices and the CPU": lambda: train(
        ["sim:1", "cpu", "sim:0", "sim:2"], "zb-h1", "always", one_thread=True
    ),
    "streams of the caller's own": lambda: call_on_own_streams(["sim:0", "sim:1"]),
    "streams of the caller's own, and the CPU": lambda: call_on_own_streams(["cpu", "sim:1"]),
    "streams of the caller's own, captured": lambda: replay_on_own_streams(["sim:0", "sim:1"]),
    "an optimizer on the host": step_on_the_host,
    "steps in the backward": step_in_backward,
    "activations on the host, loss outside": lambda: train(
        ["sim:0", "sim:1"], "gpipe", "never", inside=False, offload="activations"
    ),
    "buffers that are used again, and loads of what is still on its way": lambda: train(
        ["sim:0", "sim:1"], with_early_loads(2), "never"
    ),
    "inputs on the host": lambda: train(["sim:0", "sim:1"], "gpipe", "always", offload="activations"),
    "a failure": lambda: fail(["sim:0", "sim:1"]),
    "no default generators": seed_without_default_generators,
    "evaluation": lambda: evaluate(["sim:0", "sim:1"]),
    "a layer that moves its output": move,
    "layers that replace buffers": replace_buffers,
    "two workers that draw": draw_at_the_same_time,
    "two threads": draw_on_two_threads,
    "draws in between": draw_between,
    "draws for a shard": draw_for_shards,
    "draws of an extension": draw_unseen,
    "a layer that begins to seed, not held": lambda: not_held(begin_to_seed),
    "two workers that draw, not held": lambda: not_held(draw_at_the_same_time),
    "two threads, not held": lambda: not_held(draw_on_two_threads),
    "draws in between, not held": lambda: not_held(draw_between),
    "draws for a shard, not held": lambda: not_held(draw_for_shards),
    "evaluation, not held": lambda: not_held(lambda: evaluate(["sim:0", "sim:1"])),
}


# It takes seconds, so that a slow machine does not change its result: for mutants of the clock only.
TIMED: dict[str, Callable[[], list[Tensor]]] = {"a recording": record}


def cpu_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values, on the host."""
    return [tensor.detach().cpu() for tensor in tensors]
