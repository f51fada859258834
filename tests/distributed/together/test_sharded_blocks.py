"""Sharded layers that are compiled, checkpointed, or end in a loss over shards: the bits of the layers alone."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipework import Mesh, Pipe

Run = Callable[..., list[Any]]

WIDTH, CHUNKS, CLASSES = 8, 4, 6


class Block(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.is_checkpointed = is_checkpointed

    def inner(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return output

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.is_checkpointed else self.inner(x))


def blocks(mesh: DeviceMesh, how: tuple[str, ...] = ("",) * 4) -> nn.Sequential:
    """Four blocks, each of them checkpointed, compiled, both or neither; sharded by FSDP2 if the mesh has replicas."""
    torch.manual_seed(0)
    layers = [Block("checkpointed" in each) for each in how]
    names = mesh.mesh_dim_names or ()
    for layer, each in zip(layers, how, strict=True):
        if "tp" in names:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if "dp" in names:
            fully_shard(layer, mesh=mesh["dp"])
        if "compiled" in each:
            layer.compile(backend="aot_eager")
    return nn.Sequential(*layers)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compiled_and_checkpointed(mesh: Mesh, dimension: str) -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo, about itself
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # likewise
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", dimension))
    found = []
    for how in (("",) * 4, ("checkpointed", "compiled", "compiled checkpointed", "")):
        pipe = Pipe(
            blocks(device_mesh, how), CHUNKS, balance=[2, 2], schedule="zb-h1", loss_fn=F.mse_loss, mesh=device_mesh
        )
        torch.manual_seed(1)
        x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        for _ in range(2):
            pipe.zero_grad()
            pipe(x, target=y).backward()
        found.append({name: whole(parameter.grad) for name, parameter in pipe.named_parameters()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def losses_over_shards(mesh: Mesh) -> None:
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
    wanted = dict(plain.named_parameters())
    for schedule in ("1f1b", "zb-h1"):
        pipe = Pipe(layers(parallel=True), CHUNKS, schedule=schedule, mesh=device_mesh, **options)
        with loss_parallel():
            loss = pipe(x, target=labels)
            loss.backward()
        torch.testing.assert_close(loss, expected)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), wanted[name].grad)
    dist.barrier()


@pytest.mark.thorough
@pytest.mark.parametrize("dimension", ["tp", "dp"])
def test_compiled_and_checkpointed_blocks(on_ranks: Run, dimension: str) -> None:
    on_ranks(4, compiled_and_checkpointed, dimension=dimension, patience=120.0)


def test_a_loss_over_shards(on_ranks: Run) -> None:
    on_ranks(4, losses_over_shards)
