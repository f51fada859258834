"""With activations on the host, a step fits into memory that is too small without."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Pipe
from tests.accelerator import simulated

pytestmark = pytest.mark.gpu

WIDTH, CHUNKS = 256, 8
DEVICES = [torch.device("sim", 0), torch.device("sim", 1)]


def pipe_of(**options: Any) -> Pipe:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))
    return Pipe(layers, CHUNKS, balance=[4, 4], devices=DEVICES, loss_fn=functional.mse_loss, **options)


def step(pipe: Pipe) -> list[Tensor]:
    torch.manual_seed(1)
    x, y = (torch.randn(CHUNKS * 256, WIDTH).to(device) for device in DEVICES)
    pipe(x, target=y).backward()
    found = [parameter.grad.cpu() for parameter in pipe.parameters() if parameter.grad is not None]
    pipe.zero_grad()
    return found


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_step_fits_into_less_memory(checkpoint: str) -> None:
    plain, moving = pipe_of(checkpoint=checkpoint), pipe_of(checkpoint=checkpoint, offload="activations")
    peaks = []
    for pipe in (plain, moving):
        for device in DEVICES:
            torch.accelerator.reset_peak_memory_stats(device)
        expected = step(pipe)
        peaks.append(torch.accelerator.max_memory_allocated(DEVICES[1]))
    torch.accelerator.empty_cache()
    simulated.configure(memory_limit=[0, sum(peaks) // 2], delay_probability=0.2, delay_us=1000)
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        step(plain)
    plain.zero_grad()
    for got, wanted in zip(step(moving), expected, strict=True):
        assert torch.equal(got, wanted)


def test_a_recording_has_the_copies_one_after_the_other_beside_the_computation() -> None:
    pipe = pipe_of(checkpoint="never", offload="activations")
    simulated.configure(delay_probability=0.5, delay_us=2000)
    with pipe.record() as recording:
        step(pipe)
    line = recording.timeline()
    for worker in range(2):
        for kind in "OL":
            copies = [each for each in line.communication if (each.worker, each.action.kind) == (worker, kind)]
            copies.sort(key=lambda each: each.action.micro_batch)
            assert len(copies) == CHUNKS
            assert all(one.end <= other.start + 1e-4 for one, other in pairwise(copies))
