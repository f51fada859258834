"""Sharded layers that were built on the meta device: the mesh does not change their values, and no stage is whole."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from pipework import Mesh, Pipe, load_checkpoint, save_checkpoint
from tests.distributed.together.alike import whole
from tests.jobs import runs_on


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model(width: int, count: int, mesh: Any = None) -> nn.Sequential:
    with torch.device("meta"):
        layers = nn.Sequential(*[Block(width) for _ in range(count)])
    for layer in layers if mesh is not None else ():
        if mesh["tp"].size() > 1:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    return layers


def pipe_of(layers: nn.Sequential, mesh: Any) -> Pipe:
    return Pipe(layers, 2, schedule="1f1b", loss_fn=F.mse_loss, mesh=mesh)


@pytest.mark.parametrize("shape", [[2, 2, 1], [2, 1, 2], [1, 2, 2]])
@runs_on(4)
def test_the_values_do_not_depend_on_the_mesh(mesh: Mesh, shape: list[int], folder: str) -> None:
    torch.manual_seed(1)
    plain = Pipe(model(8, 4), 2, balance=[2, 2], devices=["cpu", "cpu"])
    device_mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "pp", "tp"))
    torch.manual_seed(1)
    layers = model(8, 4, device_mesh)
    held = dict(layers.named_parameters())
    pipe = pipe_of(layers, device_mesh)
    for name, parameter in pipe.named_parameters():
        assert parameter is held[name]
        assert torch.equal(whole(parameter), plain.get_parameter(name)), name
    optimizer = torch.optim.AdamW(pipe.parameters())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    pipe(x, target=x).backward()
    optimizer.step()
    save_checkpoint(Path(folder), pipe, optimizer, step=1)
    saved = [whole(each).clone() for each in pipe.parameters()]
    again = pipe_of(model(8, 4, device_mesh), device_mesh)
    load_checkpoint(Path(folder), again, torch.optim.AdamW(again.parameters()))
    for (name, parameter), wanted in zip(again.named_parameters(), saved, strict=True):
        assert torch.equal(whole(parameter), wanted), name


@runs_on(4, fresh=True)
def test_no_process_holds_a_whole_stage(mesh: Mesh) -> None:
    """The growth of the resident set beside a stage's weights: two stages of eight layers over two replicas."""
    device_mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "pp", "tp"))
    pipe_of(model(8, 2, device_mesh), device_mesh)(torch.ones(2, 8), target=torch.ones(2, 8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pipe = pipe_of(model(384, 16, device_mesh), device_mesh)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    # Half of it, one whole layer, and what is sent to compare replicas.
    assert grown < 0.95 * sum(each.numel() * 4 for each in pipe.parameters())
