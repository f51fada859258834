"""Trains a pipe and the plain model in one of several ways for some steps, and keeps what each of them computes.

While the pipe trains, long kernels keep streams busy, and memory that is used no more is overwritten: a value that is
read too early is then wrong, and not right by luck.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe, PipeWarning, pop, skippable, stash, torch_private
from pipework.testing import draw_key, reference_backward, reference_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

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

# From these values further cases are drawn.
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
        loss = "loss outside" if self.way == "outside" else f"{self.way}, loss inside"
        pinned = " (pinned)" if self.pinned else ""
        flags = [name for name in ("dropout", "skip", "autocast", "input_gradient") if getattr(self, name)]
        return (
            f"stages on {' '.join(map(str, self.devices))}, {loss}, checkpoint {self.checkpoint}, "
            f"batch on {self.batch_on}{pinned}, with {', '.join(flags) or 'nothing else'}, delayed: {self.delayed}"
        )


def first_cases(source: torch.device, destination: torch.device) -> list[Case]:
    """The cases that are always run; `source` is `destination` for those of a device.

    Example:
        >>> [case.way for case in first_cases(CPU, CPU)]
        ['outside', '1f1b', 'gpipe', 'zb-h1', 'outside', 'zb-h1']
    """
    if source == destination:
        here = source
        return [
            Case((here,), "outside", "never", here, input_gradient=True),
            Case((here,) * 2, "1f1b", "except_last", here, delayed="layers"),
            Case((here,) * 4, "gpipe", "always", here, delayed="caller"),
            Case((here,) * 2, "zb-h1", "never", here, dropout=False),
            Case((here,) * 4, "outside", "except_last", here, dropout=False, skip=True, delayed="layers"),
            Case((here,) * 2, "zb-h1", "always", here, autocast=True, input_gradient=True),
        ]
    two = (source, destination)
    return [
        Case(two, "1f1b", "except_last", source, input_gradient=True, delayed="copies"),
        Case(two, "outside", "never", destination, dropout=False, skip=True, delayed="caller"),
        Case(two, "zb-h1", "always", CPU, pinned=True, delayed="layers"),  # the host does not wait for pinned memory
        Case((*two, source), "zb-h1", "except_last", source, skip=True, autocast=True),
    ]


def further_cases(source: torch.device, destination: torch.device) -> Iterator[Case]:
    """Cases without end, whose settings are drawn; the same ones each time."""
    draw = random.Random(f"{source} {destination}")
    stages = (1, 2, 3, 4) if source == destination else (2, 3, 4)
    while True:
        devices = tuple((source, destination)[number % 2] for number in range(draw.choice(stages)))
        settings = {name: draw.choice(values) for name, values in SETTINGS.items()}
        case = Case(devices, batch_on=draw.choice((source, destination)), **settings)
        pins = {source, destination} != {CPU} and draw.random() < 0.2
        yield replace(case, batch_on=CPU, pinned=True) if pins else case


class LongKernels:
    """Keeps streams busy; how long a kernel takes is measured once for each device."""

    def __init__(self) -> None:
        self._launches: dict[torch.device, Callable[[], None]] = {}
        self._calls = 0

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Measures the devices, on their current streams."""
        for device in devices:
            if device not in self._launches:
                self._launches[device] = _long_kernel(device)

    def __call__(self, device: torch.device) -> None:
        """Keeps the current stream of a device busy; on the CPU, the thread."""
        self._launches[device]()

    def sometimes(self, device: torch.device) -> None:
        """Every third time: neighbouring micro-batches then differ."""
        self._calls += 1
        if self._calls % 3 == 0:
            self(device)


def _long_kernel(device: torch.device) -> Callable[[], None]:
    if device.type == "cpu":
        return functools.partial(time.sleep, SECONDS)
    spin = torch_private.spinning(torch.get_device_module(device))  # leaves room for other kernels beside it
    matrix = torch.ones(256, 256, device=device)

    def launch(times: int) -> None:
        with torch.accelerator.current_stream(device):  # the thread's current device may be another one
            for _ in range(times):
                torch.mm(matrix, matrix) if spin is None else spin(200_000)

    def seconds(times: int) -> float:
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        launch(times)
        torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    seconds(1)
    return functools.partial(launch, max(1, math.ceil(SECONDS * 20 / seconds(20))))


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


def make_model(case: Case, seed: int, wait: Callable[[torch.device], None]) -> tuple[nn.Sequential, list[int]]:
    """The layers of a case, on the CPU, and how many of them each stage has.

    Args:
        case: which.
        seed: of the weights.
        wait: if layers are delayed, called with their device, forward and backward.
    """

    def delay(module: nn.Module, inputs: Any, output: Tensor) -> None:
        wait(output.device)
        if output.requires_grad:
            output.register_hook(lambda gradient: wait(gradient.device))  # type: ignore[no-untyped-call]

    torch.manual_seed(seed)
    drop = 0.25 if case.dropout else 0.0
    layers: list[nn.Module] = []
    for _ in range(3):
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(drop)))
        if case.delayed == "layers":
            layers[-1].get_submodule("3").register_forward_hook(delay)
    layers = [*([Fork(), *layers, Join()] if case.skip else layers), nn.Linear(WIDTH, OUTPUTS)]
    stages = len(case.devices)
    return nn.Sequential(*layers), [len(layers) // stages + (stage < len(layers) % stages) for stage in range(stages)]


def make_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a step, on the CPU."""
    draw = torch.Generator().manual_seed(STEPS * seed + step)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.rand(ROWS, OUTPUTS, generator=draw)


def train_plain(case: Case, seed: int) -> dict[str, Tensor]:
    """What the plain model computes, micro-batch by micro-batch; it moves values between devices itself."""
    model, balance = make_model(case, seed, lambda device: None)
    places = [device for device, count in zip(case.devices, balance, strict=True) for _ in range(count)]
    for layer, place in zip(model, places, strict=True):
        layer.to(place).register_forward_pre_hook(
            lambda module, inputs, place=place: tuple(value.to(place) for value in inputs)
        )
    values: dict[str, Tensor] = {}
    for step in range(STEPS):
        inputs, targets = make_batch(seed, step)
        x, y = inputs.to(case.batch_on).requires_grad_(case.input_gradient), targets.to(case.devices[-1])
        torch.manual_seed(step)
        key = draw_key()
        with autocast(case):
            if case.way == "outside":
                computed = reference_backward(model, x, functools.partial(F.cross_entropy, target=y), CHUNKS, key)
            else:
                computed = reference_step(model, x, y, F.cross_entropy, CHUNKS, key)
        values |= _computed(step, model, computed.loss, computed.output, x)
        _update(model)
    return values


def train_pipe(case: Case, seed: int, kernels: LongKernels) -> dict[str, Tensor]:
    """What a pipe computes, while streams are delayed, and inputs and freed memory overwritten."""
    model, balance = make_model(case, seed, kernels.sometimes)
    inside: dict[str, Any] = {} if case.way == "outside" else {"schedule": case.way, "loss_fn": F.cross_entropy}
    accelerators = [device for device in {*case.devices, case.batch_on} if device.type != "cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipeWarning)  # a worker for each stage on one device is meant
        pipe = Pipe(model, CHUNKS, case.checkpoint, balance=balance, devices=case.devices, **inside)
    # They lie on the device already: a copy from pageable memory would make the host wait for what is delayed.
    batches = [[each.to(case.batch_on) for each in make_batch(seed, step)] for step in range(STEPS)]
    inputs, target = (torch.empty_like(each, pin_memory=case.pinned) for each in batches[0])
    values: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        for device in accelerators if case.delayed == "caller" else ():
            for _ in range(BEFORE_A_CALL):
                kernels(device)
        if case.delayed == "copies":
            for link in pipe._executor.engine_in_use().links.values():
                for stream in [] if link is None else link.copy_streams:
                    with stream:
                        kernels(stream.device)
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
        values |= _computed(step, pipe, loss, output, x)
        _overwrite(case, inputs, target)
        _update(pipe)
        del loss, output, x
        for device in accelerators:  # what the caller's streams allocate next is filled with NaN and freed again
            held = [torch.full((size,), math.nan, device=device) for size in OVERWRITTEN for _ in range(4)]
            del held
    return values


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


def _computed(step: int, model: nn.Module, loss: Tensor, output: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Copies of all results of a step, made on the caller's current streams."""
    leaves = {**dict(model.named_parameters()), **({"the inputs": x} if x.requires_grad else {})}
    gradients = {f"gradient of {name}": each.grad for name, each in leaves.items() if each.grad is not None}
    values = {"loss": loss, "output": output, **gradients}
    return {f"step {step}: {name}": value.detach().clone() for name, value in values.items()}


def _update(model: nn.Module) -> None:
    """A step of SGD, so that a step's error stays visible in all later ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=RATE)
                parameter.grad = None
