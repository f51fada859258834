"""The host waits for no device between the first launch of a step and the caller's own `.item()`."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipework import Pipe
from pipework.runtime.stage.recomputation import MINI_BATCHES
from tests.accelerator import simulated
from tests.accelerator.scenarios import Pop, Stash

pytestmark = pytest.mark.gpu


def model() -> nn.Sequential:
    return nn.Sequential(
        Stash(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), Pop(8, 8),
        nn.Linear(8, 4),
    )  # fmt: skip


def waits(
    pipe: Pipe, *, inside: bool = True, where: str = "sim", scale: float = 1.0, clip: bool = False, **options: Any
) -> dict[str, int]:
    """Why the host waits in a step, after those in which outputs are compared."""
    optimizer = torch.optim.AdamW(pipe.parameters(), foreach=True)
    devices = [where, where] if where == "cpu" else ["sim:0", "sim:3"]
    x, y = torch.randn(32, 8, device=devices[0]), torch.randint(4, (32,), device=devices[1])
    if where == "cpu":
        x, y = x.pin_memory(), y.pin_memory()
    for _ in range(MINI_BATCHES + 1):
        simulated.synchronize_all()
        simulated.reset_counts()
        loss = pipe(x, target=y, **options) if inside else functional.cross_entropy(pipe(x), y)
        (loss * scale).backward()
        if clip:
            pipe.clip_grad_norm_(1.0)
        found = simulated.host_waits()
        optimizer.step()
        optimizer.zero_grad()
    return found


def pipe_of(schedule: str = "1f1b", devices: Any = ("sim:0", "sim:1", "sim:2", "sim:3"), **options: Any) -> Pipe:
    options.setdefault("loss_fn", functional.cross_entropy)
    return Pipe(model(), 4, schedule=schedule, devices=devices, balance=[2, 2, 2, 2], **options)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("where", ["sim", "cpu"])
def test_no_wait_in_a_step(schedule: str, checkpoint: str, where: str) -> None:
    assert waits(pipe_of(schedule, checkpoint=checkpoint), where=where) == {}


LOSSES = {
    "mean over numbers": lambda output, target: functional.mse_loss(output, functional.one_hot(target, 4).float()),
    "padded targets": nn.CrossEntropyLoss(ignore_index=0),
    "smoothed": partial(functional.cross_entropy, label_smoothing=0.1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_no_wait_for_the_loss(name: str) -> None:
    assert waits(pipe_of(loss_fn=LOSSES[name])) == {}


def test_no_wait_for_a_loss_outside_scales_norms_and_several_workers_on_a_device() -> None:
    assert waits(pipe_of("gpipe"), inside=False) == {}
    assert waits(pipe_of("gpipe", offload=1), inside=False) == {}
    assert waits(pipe_of(checkpoint="always", offload=1)) == {}
    scaler = torch.amp.GradScaler("sim")
    scaler.scale(torch.ones((), device="sim:3"))
    assert waits(pipe_of(grad_scaler=scaler)) == {}
    assert waits(pipe_of(), scale=0.25) == {}
    assert waits(pipe_of(), loss_scale=torch.tensor(0.25, device="sim:3")) == {}
    assert waits(pipe_of(), clip=True) == {}
    assert waits(pipe_of(devices=["sim:0", "sim:0", "sim:3", "sim:3"])) == {}
    assert waits(pipe_of(deferred_batch_norm=True)) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"loss_fn": nn.CrossEntropyLoss(weight=torch.rand(4))},
        {"loss_fn": nn.CrossEntropyLoss(ignore_index=0), "loss_weight": lambda target: (target > 0).sum()},
    ],
    ids=["weights of classes", "loss_weight"],
)
def test_one_wait_for_weights_that_may_be_zero(options: dict[str, Any]) -> None:
    assert waits(pipe_of(**options)) == {"a copy to the host": 1}
