"""Layers that are tensor parallel inside of stages: the same bits as those layers without a pipe."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from pipework import Mesh, Pipe
from pipework.testing import draw_key, reference_step

Run = Callable[..., list[Any]]

WIDTH, HIDDEN, CHUNKS = 8, 16, 4


class Block(nn.Module):
    """A feed-forward block of a transformer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Enter(nn.Module):
    """From whole rows to this rank's part of their sequence."""

    def __init__(self, mesh: DeviceMesh, *, local: bool) -> None:
        super().__init__()
        self.mesh, self.local = mesh, local

    def forward(self, x: Tensor) -> Tensor:
        sharded = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        return sharded.to_local() if self.local else sharded


class Leave(nn.Module):
    """Back to whole rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        sharded = x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [Shard(1)])
        return sharded.full_tensor()


PLANS: dict[str, dict[str, Any]] = {
    "tensor": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
    "dtensors": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    },
}


def model(mesh: DeviceMesh, plan: str = "tensor", dropout: float = 0.0) -> nn.Sequential:
    """Four layers, or six; with sequence parallelism, parts of sequences go between them, as tensors or as DTensors."""
    torch.manual_seed(0)
    blocks = [Block(dropout) for _ in range(4)]
    for block in blocks:
        parallelize_module(block, mesh, PLANS[plan])
    if plan == "tensor":
        return nn.Sequential(*blocks)
    return nn.Sequential(Enter(mesh, local=plan == "sequence"), *blocks, Leave(mesh))


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, 4, WIDTH, generator=generator), torch.randn(rows, 4, WIDTH, generator=generator)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def differences(pipe: Pipe, reference: nn.Module) -> list[str]:
    named = dict(reference.named_parameters())
    found = []
    for name, parameter in pipe.named_parameters():
        wanted = named[name].grad
        assert parameter.grad is not None
        assert wanted is not None
        if type(parameter.grad) is not type(wanted):
            found.append(f"{name} has a gradient of {type(parameter.grad)}")
        elif isinstance(wanted, DTensor) and parameter.grad.placements != wanted.placements:
            found.append(f"{name} has a gradient in {parameter.grad.placements}, and wanted {wanted.placements}")
        elif not torch.equal(local(parameter.grad), local(wanted)):
            found.append(f"{name} differs")
    return found


def trained(mesh: Mesh, cases: list[list[str]]) -> list[str]:
    """Each case for some steps, beside the layers without a pipe."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    x, y = data()
    problems = []
    for schedule, checkpoint, plan in cases:
        balance = [2, 2] if schedule in ("gpipe", "1f1b", "zb-h1") else [1, 1, 1, 1]
        if plan != "tensor":
            balance[0], balance[-1] = balance[0] + 1, balance[-1] + 1
        reference = model(whole["tp"], plan, 0.1)
        pipe = Pipe(
            model(whole["tp"], plan, 0.1),
            CHUNKS,
            checkpoint,
            balance=balance,
            schedule=schedule,
            loss_fn=F.mse_loss,
            mesh=whole,
        )
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (pipe, reference)]
        for step in range(2):
            torch.manual_seed(step)
            key = draw_key()
            torch.manual_seed(step)
            loss = pipe(x, target=y)
            loss.backward()
            wanted = reference_step(reference, x, y, F.mse_loss, chunks=CHUNKS, key=key)
            found = differences(pipe, reference)
            if not torch.equal(loss.detach(), wanted.loss):
                found.append(f"the loss is {loss.item()} for {wanted.loss.item()}")
            problems += [f"{schedule} {checkpoint} {plan} step {step}: {each}" for each in found]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if schedule.startswith("zb") and not any(
            deferred for stage in pipe._executor.engine_in_use().stages.values() for deferred in stage.deferred.values()
        ):
            problems.append(f"{schedule} defers no gradient")
    return problems


SCHEDULES = "gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "looped-bfs", "zb-v", "dualpipe-v"
SAMPLE = [
    ("1f1b", "never", "tensor"),
    ("zb-h1", "except_last", "dtensors"),
    ("interleaved-1f1b", "always", "sequence"),
    ("zb-v", "never", "tensor"),
]


def test_the_bits_of_the_layers_without_a_pipe(on_ranks: Run) -> None:
    for problems in on_ranks(4, trained, cases=SAMPLE):
        assert not problems


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_and_mode(on_ranks: Run, schedule: str) -> None:
    cases = [(schedule, mode, plan) for mode in ("never", "except_last", "always") for plan in PLANS]
    for problems in on_ranks(4, trained, cases=cases, patience=200.0):
        assert not problems
