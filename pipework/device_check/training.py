"""Trains a pipe and the plain model for some steps, and keeps what each of them computes."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe, PipeWarning
from pipework.device_check.model import OUTPUTS, WIDTH, balance_of, make_model, placed
from pipework.device_check.provoke import LongKernels, autocast, churn
from pipework.testing import draw_key, reference_backward, reference_step

if TYPE_CHECKING:
    from pipework.device_check.cases import Case

STEPS: Final = 3
CHUNKS: Final = 4
_ROWS: Final = 64
_RATE: Final = 0.1

# By name, for each step.
Values: TypeAlias = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Batch:
    """A mini-batch."""

    inputs: Tensor
    target: Tensor


def make_batches(seed: int) -> list[Batch]:
    """A mini-batch for each step."""
    draw = torch.Generator().manual_seed(seed)
    return [
        Batch(torch.randn(_ROWS, WIDTH, generator=draw), torch.rand(_ROWS, OUTPUTS, generator=draw))
        for _ in range(STEPS)
    ]


def train_plain(case: Case, seed: int) -> Values:
    """What the plain model computes, micro-batch by micro-batch."""
    torch.manual_seed(seed)
    model = make_model(case, lambda device: None)
    placed(model, balance_of(case, len(model)), case.devices)
    values: Values = []
    for step, batch in enumerate(make_batches(seed)):
        x = batch.inputs.to(case.batch_on).requires_grad_(case.input_gradient)
        y = batch.target.to(case.devices[-1])
        torch.manual_seed(step)
        key = draw_key()
        with autocast(case.devices, case.autocast):
            if case.way == "outside":
                computed = reference_backward(model, x, functools.partial(F.cross_entropy, target=y), CHUNKS, key)
            else:
                computed = reference_step(model, x, y, F.cross_entropy, CHUNKS, key)
        values.append(_computed(model, computed.loss, computed.output, x))
        _update(model)
    return values


def train_pipe(case: Case, seed: int, kernels: LongKernels) -> Values:
    """What a pipe computes, while streams are delayed, and inputs and freed memory overwritten."""
    torch.manual_seed(seed)
    model = make_model(case, kernels.sometimes)
    inside: dict[str, Any] = {} if case.way == "outside" else {"schedule": case.way, "loss_fn": F.cross_entropy}
    accelerators = [device for device in {*case.devices, case.batch_on} if device.type != "cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipeWarning)  # a worker for each stage on one device is meant
        pipe = Pipe(
            model, CHUNKS, case.checkpoint, balance=balance_of(case, len(model)), devices=case.devices, **inside
        )
    # They lie on the device already: a copy from pageable memory would make the host wait for what is delayed.
    batches = [Batch(batch.inputs.to(case.batch_on), batch.target.to(case.batch_on)) for batch in make_batches(seed)]
    inputs, target = (_buffer(case, each) for each in (batches[0].inputs, batches[0].target))
    values: Values = []
    for step, batch in enumerate(batches):
        if case.delayed == "caller":
            for device in accelerators:
                kernels.before_a_call(device)
        if case.delayed == "copies":
            kernels.on_copy_streams(pipe._executor.engine_in_use())
        inputs.copy_(batch.inputs)
        target.copy_(batch.target)
        x = inputs.detach().requires_grad_(case.input_gradient)
        torch.manual_seed(step)
        with autocast(case.devices, case.autocast):
            if inside:
                loss, output = pipe(x, target=target, return_output=True)
                _overwrite(case, inputs, target)
            else:
                output = pipe(x)
                loss = F.cross_entropy(output, target.to(output.device))
        loss.backward()
        values.append(_computed(pipe, loss, output, x))
        _overwrite(case, inputs, target)
        _update(pipe)
        del loss, output, x
        churn(accelerators)
    return values


def _buffer(case: Case, like: Tensor) -> Tensor:
    return torch.empty_like(like, device=case.batch_on, pin_memory=case.pinned)


def _overwrite(case: Case, inputs: Tensor, target: Tensor) -> None:
    """Overwrites the caller's mini-batch, in the order of the caller's stream."""
    if case.pinned:
        # Copies from pinned memory run on the caller's streams, and the host does not wait for them by itself.
        for device in {*case.devices}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).record_event().synchronize()
    with torch.no_grad():
        inputs.fill_(math.nan)
        target.fill_(math.nan)


def _computed(model: nn.Module, loss: Tensor, output: Any, x: Tensor) -> dict[str, Tensor]:
    """Copies of all results, made on the caller's current streams."""
    values = {"loss": loss, "output": output}
    values |= {f"gradient of {name}": _gradient(each) for name, each in model.named_parameters()}
    if x.requires_grad:
        values["gradient of the inputs"] = _gradient(x)
    return {name: value.detach().clone() for name, value in values.items()}


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _update(model: nn.Module) -> None:
    """A step of SGD, so that a step's error stays visible in all later ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=_RATE)
                parameter.grad = None
