"""Trains a pipe and the plain model in one of several ways for some steps, and keeps what each of them computes.

While the pipe trains, long kernels keep streams busy, and memory that is used no more is overwritten: a value that is
read too early is then wrong, and not right by luck.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe, PipeWarning, pop, skippable, stash, torch_private
from pipework.testing import draw_key, reference_backward, reference_step
from pipework.testing.comparison import on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

STEPS: Final = 3
CHUNKS: Final = 4
# The rows of a micro-batch begin at multiples of 512 bytes, as memory of CUDA's allocator does, in bfloat16 too: some
# libraries choose kernels by alignment.
WIDTH: Final = 256
OUTPUTS: Final = 16
ROWS: Final = 64
RATE: Final = 0.1
SECONDS: Final = 0.004  # of a long kernel: far longer than a kernel of these models, and than a copy of their tensors
BEFORE_A_CALL: Final = 8  # long kernels: far longer than the host takes from a call to the first layer
OVERWRITTEN: Final = (1 << 10, 1 << 12, 1 << 14, 1 << 16)  # numbers of elements, as activations and weights have


CPU: Final = torch.device("cpu")
FIRST: Final = 6  # cases of each device and link that are always run
SEED: Final = 2470  # with which they have every setting

_Computed: TypeAlias = tuple[int, Tensor, Tensor, Tensor]  # a step, its loss, its output and its inputs

# From these values cases are drawn.
SETTINGS: Final[Mapping[str, tuple[Any, ...]]] = {
    "way": ("outside", "gpipe", "1f1b", "zb-h1"),
    "checkpoint": ("never", "except_last", "always"),
    "dropout": (True, False),
    "skip": (True, False),
    "autocast": (True, False, False),
    "input_gradient": (True, False),
    "delayed": ("nothing", "caller", "layers", "copies"),
}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        devices: of the workers, each with one stage.
        way: the schedule, with the loss inside; or "outside", with the default schedule.
        checkpoint: of the pipe.
        batch_on: the device of the caller's inputs and targets.
        pinned: whether these lie in pinned memory of the host.
        dropout: whether layers draw.
        skip: whether the first layer hands a tensor to the last one.
        autocast: whether it is on for all devices, to bfloat16.
        input_gradient: whether the inputs require one.
        delayed: the streams that long kernels keep busy: "nothing", the "caller"'s, those of "layers" or of "copies".
    """

    devices: tuple[torch.device, ...]
    way: str
    checkpoint: str
    batch_on: torch.device
    pinned: bool = False
    dropout: bool = True
    skip: bool = False
    autocast: bool = False
    input_gradient: bool = False
    delayed: str = "nothing"

    def __str__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if value and name not in ("devices", "batch_on")}
        others = "".join(f", {name} {value}" for name, value in settings.items())
        return f"stages on {' '.join(map(str, self.devices))}, batch on {self.batch_on}{others}"


def cases_of(source: torch.device, destination: torch.device) -> Iterator[Case]:
    """Cases without end for a device or a link, whose settings are drawn: the same ones each time.

    Among the first `FIRST` ones is every setting.

    Example:
        >>> [case.way for case in itertools.islice(cases_of(CPU, CPU), FIRST)]
        ['gpipe', 'zb-h1', 'zb-h1', 'outside', '1f1b', 'outside']
    """
    draw = random.Random(SEED)
    while True:
        stages = draw.choice((2, 3, 4) if source != destination else (1, 2, 3, 4))
        settings = {name: draw.choice(values) for name, values in SETTINGS.items()}
        batch_on, is_pinned = draw.choice((source, destination)), draw.random() < 0.2
        pinned = is_pinned and {source, destination} != {CPU}
        devices = tuple((source, destination)[number % 2] for number in range(stages))
        yield Case(devices, batch_on=CPU if pinned else batch_on, pinned=pinned, **settings)


def _long_kernel(device: torch.device) -> Callable[[], None]:
    """What keeps the current stream of a device busy, with as many kernels as that takes; on the CPU, the thread."""
    if device.type == "cpu":
        return functools.partial(time.sleep, SECONDS)
    spin = torch_private.spinning(torch.get_device_module(device))  # leaves room for other kernels beside it
    matrix = torch.ones(256, 256, device=device)

    def launch(times: int) -> None:
        with torch.accelerator.current_stream(device):  # the thread's current device may be another one
            for _ in range(times):
                torch.mm(matrix, matrix) if spin is None else spin(200_000)

    for _ in range(2):  # the first time is longer than the others
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        launch(20)
        torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - start
    return functools.partial(launch, max(1, math.ceil(SECONDS * 20 / seconds)))


@skippable(stash=["skip"])
class Fork(nn.Module):
    """Stashes what it computes, and returns another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        """A generator; see `pipework.skippable`."""
        y = self.linear(x)
        yield stash("skip", torch.tanh(y))
        return torch.sigmoid(y)


@skippable(pop=["skip"])
class Join(nn.Module):
    """Adds what `Fork` has stashed."""

    def forward(self, x: Tensor) -> Any:
        """A generator; see `pipework.skippable`."""
        skip = yield pop("skip")
        return x + skip.to(x.device)  # in the plain model it comes from another device


def make_model(case: Case, seed: int) -> tuple[nn.Sequential, list[int]]:
    """The layers of a case, on the CPU, and how many of them each stage has."""
    torch.manual_seed(seed)
    drop = 0.25 if case.dropout else 0.0
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(drop)) for _ in range(3)
    ]
    layers = [*([Fork(), *layers, Join()] if case.skip else layers), nn.Linear(WIDTH, OUTPUTS)]
    stages = len(case.devices)
    return nn.Sequential(*layers), [len(layers) // stages + (stage < len(layers) % stages) for stage in range(stages)]


def make_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a step, on the CPU."""
    draw = torch.Generator().manual_seed(STEPS * seed + step)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.rand(ROWS, OUTPUTS, generator=draw)


def train_plain(case: Case, seed: int) -> dict[str, Tensor]:
    """What the plain model computes, micro-batch by micro-batch; it moves values between devices itself."""
    model, balance = make_model(case, seed)
    places = [device for device, count in zip(case.devices, balance, strict=True) for _ in range(count)]
    for layer, place in zip(model, places, strict=True):
        layer.to(place).register_forward_pre_hook(
            lambda module, inputs, place=place: tuple(value.to(place) for value in inputs)
        )

    def steps() -> Iterator[_Computed]:
        for step in range(STEPS):
            inputs, targets = make_batch(seed, step)
            x, y = inputs.to(case.batch_on).requires_grad_(case.input_gradient), targets.to(case.devices[-1])
            torch.manual_seed(step)
            with autocast(case):
                if case.way == "outside":
                    loss_of = functools.partial(F.cross_entropy, target=y)
                    found = reference_backward(model, x, loss_of, CHUNKS, draw_key())
                else:
                    found = reference_step(model, x, y, F.cross_entropy, CHUNKS, draw_key())
            yield step, found.loss, found.output, x

    return _trained(model, steps())


def train_pipe(case: Case, seed: int) -> dict[str, Tensor]:
    """What a pipe computes, while streams are delayed, and inputs and freed memory overwritten."""
    model, balance = make_model(case, seed)
    inside: dict[str, Any] = {} if case.way == "outside" else {"schedule": case.way, "loss_fn": F.cross_entropy}
    wait = {device: _long_kernel(device) for device in {*case.devices, case.batch_on}}
    accelerators = [device for device in wait if device.type != "cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipeWarning)  # a worker for each stage on one device is meant
        pipe = Pipe(model, CHUNKS, case.checkpoint, balance=balance, devices=case.devices, **inside)
    calls = itertools.count(1)

    def delay(tensor: Tensor) -> None:
        if next(calls) % 3 == 0:  # neighbouring micro-batches then differ
            wait[tensor.device]()

    def delay_both(module: nn.Module, inputs: Any, output: Tensor) -> None:
        delay(output)
        if output.requires_grad:
            output.register_hook(delay)  # type: ignore[no-untyped-call]

    for layer in pipe.modules():
        if case.delayed == "layers" and isinstance(layer, nn.Dropout):
            layer.register_forward_hook(delay_both)
    # They lie on the device already: a copy from pageable memory would make the host wait for what is delayed.
    batches = [[each.to(case.batch_on) for each in make_batch(seed, step)] for step in range(STEPS)]
    inputs, target = (torch.empty_like(each, pin_memory=case.pinned) for each in batches[0])

    def steps() -> Iterator[_Computed]:
        for step, batch in enumerate(batches):
            for device in accelerators if case.delayed == "caller" else ():
                for _ in range(BEFORE_A_CALL):
                    wait[device]()
            for link in pipe._executor.engine_in_use().links.values() if case.delayed == "copies" else ():
                for stream in [] if link is None else link.copy_streams:
                    with stream:
                        wait[stream.device]()
            inputs.copy_(batch[0])
            target.copy_(batch[1])
            x = inputs.detach().requires_grad_(case.input_gradient)
            torch.manual_seed(step)
            with autocast(case):
                if inside:
                    loss, output = pipe(x, target=target, return_output=True)
                    _overwrite(case, inputs, target)
                else:
                    output = pipe(x)
                    loss = F.cross_entropy(output, target.to(output.device))
            loss.backward()
            yield step, loss, output, x
            del loss, output, x
            _overwrite(case, inputs, target)
            for device in accelerators:  # what the caller's streams allocate next is filled with NaN and freed again
                held = [torch.full((size,), math.nan, device=device) for size in OVERWRITTEN for _ in range(4)]
                del held

    return _trained(pipe, steps())


def _trained(model: nn.Module, steps: Iterator[_Computed]) -> dict[str, Tensor]:
    """Loss, output and gradients of all steps, on the CPU; copied on the caller's current streams.

    After each step follows one of SGD, so that a step's error stays visible in all later ones.
    """
    values: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step, loss, output, x in steps:  # `enumerate` would hold them during the next step
        leaves = {**dict(model.named_parameters()), "the inputs": x}
        gradients = {f"gradient of {name}": each.grad for name, each in leaves.items() if each.grad is not None}
        found = {"loss": loss, "output": output, **gradients}
        values |= {f"step {step}: {name}": value.detach().clone() for name, value in found.items()}
        optimizer.step()
        optimizer.zero_grad()
        del loss, output, x, leaves, gradients, found  # their memory is used again
    return {name: on_host(value) for name, value in values.items()}


@contextlib.contextmanager
def autocast(case: Case) -> Iterator[None]:
    """Autocast to bfloat16 for all kinds of devices of a case, if it wants that."""
    with contextlib.ExitStack() as stack:
        for kind in sorted({device.type for device in case.devices}) if case.autocast else ():
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
        yield


def _overwrite(case: Case, inputs: Tensor, target: Tensor) -> None:
    """Overwrites the caller's mini-batch, in the order of the caller's stream."""
    # Copies from pinned memory run on the caller's streams, and the host does not wait for them by itself.
    for device in {*case.devices} if case.pinned else ():
        if device.type != "cpu":
            torch.accelerator.current_stream(device).record_event().synchronize()
    with torch.no_grad():
        inputs.fill_(math.nan)
        target.fill_(math.nan)
