"""Sharded layers that are compiled, checkpointed, or end in a loss over shards: the bits of the layers alone."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipework import Mesh, Pipe
from tests.distributed.together.alike import other_gradients
from tests.distributed.together.sharding import CHUNKS, PLAN, WIDTH, Block, close, data
from tests.jobs import runs_on

CLASSES = 6


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.thorough
@pytest.mark.parametrize("dimension", ["tp", "dp"])
@runs_on(4, patience=120.0)
def test_compiled_and_checkpointed_blocks(mesh: Mesh, dimension: str) -> None:
    """Of four blocks, one is checkpointed, one compiled, and one both."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo, about itself
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # likewise
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", dimension))
    x, y = data()
    pipes = []
    for how in (("",) * 4, ("checkpointed", "compiled", "compiled checkpointed", "")):
        torch.manual_seed(0)
        layers = [Checkpointed() if "checkpointed" in each else Block() for each in how]
        for layer, each in zip(layers, how, strict=True):
            if dimension == "tp":
                parallelize_module(layer, device_mesh["tp"], PLAN)
            else:
                fully_shard(layer, mesh=device_mesh["dp"])
            if "compiled" in each:
                layer.compile(backend="aot_eager")
        pipes.append(Pipe(nn.Sequential(*layers), CHUNKS, schedule="zb-h1", loss_fn=F.mse_loss, mesh=device_mesh))
        for _ in range(2):
            pipes[-1].zero_grad()
            pipes[-1](x, target=y).backward()
    assert other_gradients(*pipes) == []


@pytest.mark.thorough
@runs_on(4)
def test_a_loss_over_shards(mesh: Mesh) -> None:
    """The last layer gives logits whose classes are sharded, and the loss never gathers them."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def layers(parallel: bool) -> nn.Sequential:
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, CLASSES)
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), head)
        if parallel:
            style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            made[2] = parallelize_module(head, device_mesh["tp"], style)
        return made

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    torch.manual_seed(1)
    x, labels = torch.randn(8, WIDTH), torch.randint(CLASSES, (8,))
    options: dict[str, Any] = {"balance": [2, 1], "loss_fn": loss_of}
    plain = Pipe(layers(parallel=False), CHUNKS, devices=["cpu", "cpu"], schedule="1f1b", **options)
    expected = plain(x, target=labels)
    expected.backward()
    for schedule in ("1f1b", "zb-h1"):
        pipe = Pipe(layers(parallel=True), CHUNKS, schedule=schedule, mesh=device_mesh, **options)
        with loss_parallel():
            loss = pipe(x, target=labels)
            loss.backward()
        torch.testing.assert_close(loss, expected)
        close(pipe, {name: parameter.grad for name, parameter in plain.named_parameters()})
