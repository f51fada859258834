"""Memory of a device runs out in a step: the error names the stage, and afterwards all is as before."""

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Pipe
from tests.accelerator import simulated

pytestmark = pytest.mark.gpu

WIDTH = 256
DEVICES = [torch.device("sim", 0), torch.device("sim", 1)]


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH).to(DEVICES[0]), torch.randn(rows, WIDTH).to(DEVICES[1])


def allocated() -> list[int]:
    gc.collect()
    return [torch.accelerator.memory_allocated(device) for device in DEVICES]


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v", "outside", "offload"])
def test_the_error_names_the_stage_and_the_next_step_is_right(schedule: str, full: int) -> None:
    stages = 4 if schedule in ("interleaved-1f1b", "zb-v") else 2
    pipe = Pipe(
        nn.Sequential(*(block() for _ in range(4))), 8, "never", balance=[4 // stages] * stages, devices=DEVICES,
        schedule="gpipe" if schedule in ("outside", "offload") else schedule, loss_fn=functional.mse_loss,
        offload=schedule == "offload" and "activations",
    )  # fmt: skip

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        (functional.mse_loss(pipe(x), y) if schedule == "outside" else pipe(x, target=y)).backward()
        gradients = [parameter.grad.cpu() for parameter in pipe.parameters() if parameter.grad is not None]
        pipe.zero_grad()
        return gradients

    small, large = batch(64), batch(1024)
    expected = step(*small)
    before = allocated()  # what earlier tests have left would make room later
    torch.accelerator.empty_cache()
    limits = [0, 0]
    limits[full] = torch.accelerator.memory_reserved(DEVICES[full]) + 2**21
    simulated.configure(memory_limit=limits)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(*large)
    # Of which stage is left to chance; it may be one of the other device that sends its gradient to the full one.
    assert any("out of memory in stage" in note for note in caught.value.__notes__)
    del caught
    pipe.zero_grad()
    assert allocated() == before
    for got, wanted in zip(step(*small), expected, strict=True):  # as if nothing had happened
        assert torch.equal(got, wanted)
    assert allocated() == before
