"""Layers that are tensor parallel inside of stages: the same bits as those layers without a pipe."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

from pipework import Mesh, Pipe
from pipework.testing import draw_key, reference_step
from tests.distributed.together.alike import of_all_ranks, other_gradients
from tests.distributed.together.sharding import CHUNKS, PLAN, WIDTH, Block
from tests.exactness.test_offload import reserved
from tests.jobs import runs_on


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
    "tensor": PLAN,
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


def model(mesh: DeviceMesh, plan: str) -> nn.Sequential:
    """Four layers, or six; with sequence parallelism, parts of sequences go between them, as tensors or as DTensors."""
    torch.manual_seed(0)
    blocks = [Block(dropout=0.1) for _ in range(4)]
    for block in blocks:
        parallelize_module(block, mesh, PLANS[plan])
    if plan == "tensor":
        return nn.Sequential(*blocks)
    return nn.Sequential(Enter(mesh, local=plan == "sequence"), *blocks, Leave(mesh))


SCHEDULES = "gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "looped-bfs", "zb-v", "dualpipe-v"
SLOW = [
    pytest.param(schedule, mode, plan, offload, marks=pytest.mark.slow)
    for offload in (False, "activations")
    for schedule in SCHEDULES
    for mode in ("never", "except_last", "always")
    for plan in PLANS
]


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "plan", "offload"),
    [
        ("1f1b", "never", "tensor", False),
        ("zb-h1", "except_last", "dtensors", False),
        ("interleaved-1f1b", "always", "sequence", False),
        ("zb-v", "never", "tensor", "activations"),
        ("gpipe", "except_last", "dtensors", 1),
        *SLOW,
    ],
)
@runs_on(4)
def test_the_bits_of_the_layers_without_a_pipe(
    mesh: Mesh, schedule: str, checkpoint: str, plan: str, offload: bool | int | str
) -> None:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(8, 4, WIDTH, generator=generator) for _ in range(2))
    balance = [2, 2] if schedule in ("gpipe", "1f1b", "zb-h1") else [1, 1, 1, 1]
    if plan != "tensor":
        balance[0], balance[-1] = balance[0] + 1, balance[-1] + 1
    options: dict[str, Any] = {"balance": balance, "schedule": schedule, "loss_fn": F.mse_loss, "mesh": device_mesh}
    reference = model(device_mesh["tp"], plan)
    pipe = Pipe(model(device_mesh["tp"], plan), CHUNKS, checkpoint, offload=offload, **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (pipe, reference)]
    for step in range(2):
        torch.manual_seed(step)
        key = draw_key()
        torch.manual_seed(step)
        loss = pipe(x, target=y)
        loss.backward()
        wanted = reference_step(reference, x, y, F.mse_loss, chunks=CHUNKS, key=key)
        assert torch.equal(loss.detach(), wanted.loss)
        assert other_gradients(pipe, reference) == []
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    stages = pipe._executor.engine_in_use().stages.values()
    assert any(of_all_ranks(reserved(pipe))) == (bool(offload) and plan != "dtensors")  # DTensors stay
    assert schedule.startswith("zb") <= any(deferred for stage in stages for deferred in stage.deferred.values())
