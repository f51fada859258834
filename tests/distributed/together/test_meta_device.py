"""Sharded layers that were built on the meta device: the mesh does not change their values, and no stage is whole."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from pipework import Mesh, Pipe, load_checkpoint, save_checkpoint

Run = Callable[..., list[Any]]


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


def same_values(mesh: Mesh, folder: str) -> list[str]:
    problems = []
    torch.manual_seed(1)
    plain = Pipe(model(8, 4), 2, balance=[2, 2], devices=["cpu", "cpu"])
    for shape in ((2, 2, 1), (2, 1, 2), (1, 2, 2)):
        whole = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp"))
        torch.manual_seed(1)
        layers = model(8, 4, whole)
        held = dict(layers.named_parameters())
        options: dict[str, Any] = {
            "balance": [4 // shape[1]] * shape[1], "schedule": "1f1b", "loss_fn": F.mse_loss, "mesh": whole,
        }  # fmt: skip
        pipe = Pipe(layers, 2, **options)
        for name, parameter in pipe.named_parameters():
            if parameter is not held[name]:
                problems.append(f"{shape}: {name} is another object")
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if not torch.equal(full, plain.get_parameter(name)):
                problems.append(f"{shape}: {name} differs")
        optimizer = torch.optim.AdamW(pipe.parameters())
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        pipe(x, target=x).backward()
        optimizer.step()
        save_checkpoint(Path(folder) / str(shape), pipe, optimizer, step=1)
        saved = [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in pipe.parameters()]
        again = Pipe(model(8, 4, whole), 2, **options)
        load_checkpoint(Path(folder) / str(shape), again, torch.optim.AdamW(again.parameters()))
        for (name, parameter), wanted in zip(again.named_parameters(), saved, strict=True):
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if not torch.equal(full, wanted):
                problems.append(f"{shape}: {name} was not loaded")
    return problems


def peak(mesh: Mesh) -> list[float]:
    """The growth of the resident set in units of a stage's weights: two stages of eight layers over two replicas."""
    whole = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "pp", "tp"))
    warm = Pipe(model(8, 2, whole), 2, balance=[1, 1], schedule="1f1b", loss_fn=F.mse_loss, mesh=whole)
    warm(torch.ones(2, 8), target=torch.ones(2, 8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pipe = Pipe(model(384, 16, whole), 2, balance=[8, 8], schedule="1f1b", loss_fn=F.mse_loss, mesh=whole)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return [grown / sum(each.numel() * 4 for each in pipe.parameters())]


def test_the_values_do_not_depend_on_the_mesh(on_ranks: Run, tmp_path: Path) -> None:
    for problems in on_ranks(4, same_values, folder=str(tmp_path)):
        assert not problems


def test_no_process_holds_a_whole_stage(on_ranks: Run) -> None:
    for (stages,) in on_ranks(4, peak):
        assert stages < 0.95  # half of it, one whole layer, and what is sent to compare replicas
