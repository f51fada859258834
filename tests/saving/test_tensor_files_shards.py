"""Checkpoints of sharded layers: what was saved on any mesh is loaded on any other, and by one process."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from pipework import Mesh, Pipe, load_checkpoint, save_checkpoint
from pipework.saving.convert import convert

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
    from torch.distributed.optim import ZeroRedundancyOptimizer


Run = Callable[..., list[Any]]

WIDTH, CHUNKS = 8, 2
MESHES = {  # the sizes of dp, pp and tp
    "replicas": (2, 2, 1),
    "zero-1": (2, 2, 1),
    "tensor": (1, 2, 2),
    "fsdp": (2, 2, 1),
    "fsdp and tensor": (2, 1, 2),
    "four stages": (1, 4, 1),
    "one process": None,
}


class Block(nn.Module):
    """Sizes that do not divide; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.odd = nn.Parameter(torch.randn(5))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.odd.sum()


def make(kind: str, seed: int) -> tuple[Pipe, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    with torch.device("meta" if seed and kind == "four stages" else "cpu"):  # what is loaded fills layers without data
        layers = nn.Sequential(*[Block() for _ in range(4)])
    shape, options = MESHES[kind], {"schedule": "1f1b", "loss_fn": F.mse_loss}
    if shape is None:
        pipe = Pipe(layers, CHUNKS, balance=[2, 2], devices=["cpu", "cpu"], **options)
        return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.01)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp"))
    for layer in layers:
        if "tensor" in kind:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if "fsdp" in kind:
            fully_shard(layer, mesh=mesh["dp"])
    pipe = Pipe(layers, CHUNKS, balance=[4 // shape[1]] * shape[1], mesh=mesh, **options)
    if kind == "zero-1":
        group = mesh["dp"].get_group()
        return pipe, ZeroRedundancyOptimizer(pipe.parameters(), torch.optim.AdamW, process_group=group, lr=0.01)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.01)


def train(pipe: Pipe, optimizer: torch.optim.Optimizer, seed: int, *, steps: bool = True) -> None:
    """One step; all replicas get the same rows, so that the gradients do not depend on their number."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)
    optimizer.zero_grad()
    pipe(x, target=y).backward()
    if steps:
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everything(pipe: Pipe, optimizer: torch.optim.Optimizer, *, alone: bool) -> dict[str, Tensor]:
    """Whole parameters, gradients and states of the optimizer, of all stages."""
    found = {}
    for name, parameter in pipe.named_parameters():
        found[name] = whole(parameter)
        if parameter.grad is not None:
            found[f"{name} gradient"] = whole(parameter.grad)
        state = optimizer.optim.state if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state
        for key, value in state.get(parameter, {}).items():
            found[f"{name} {key}"] = whole(value)
    if alone:
        return found
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return {name: tensor for each in gathered for name, tensor in each.items()}


def from_any_to_any(mesh: Mesh, folder: str, sources: list[str]) -> list[str]:
    problems = []
    for source in sources:
        place = Path(folder) / source
        alone = source == "one process"
        pipe, optimizer = make(source, 0)
        for step in range(2):
            train(pipe, optimizer, step)
        if not alone or mesh.rank == 0:
            path = save_checkpoint(place, pipe, optimizer, step=2)
            if mesh.rank == 0:
                convert(path, place / "model.safetensors")
        dist.barrier()
        wanted = everything(pipe, optimizer, alone=alone)
        converted = load_file(place / "model.safetensors")
        if not all(torch.equal(converted[name], wanted[name]) for name, _ in pipe.named_parameters()):
            problems.append(f"{source}: what was converted differs")
        train(pipe, optimizer, 7, steps=False)
        gradients = everything(pipe, optimizer, alone=alone)
        for target in MESHES:
            pipe, optimizer = make(target, 1)
            checkpoint = load_checkpoint(place, pipe, optimizer)
            assert checkpoint is not None
            optimizer.zero_grad()
            found = everything(pipe, optimizer, alone=target == "one process")
            for name, tensor in wanted.items():
                if "gradient" not in name and not torch.equal(tensor, found[name]):
                    problems.append(f"from {source} to {target}: {name} differs")
            train(pipe, optimizer, 7, steps=False)
            found = everything(pipe, optimizer, alone=target == "one process")
            for name, tensor in gradients.items():
                if not torch.allclose(tensor, found[name], rtol=1e-4, atol=1e-6):
                    problems.append(f"from {source} to {target}: after a step {name} differs")
        if not alone:
            sizes = [path.stat().st_size for path in (place / "step-00000002").glob("model-stage-*-shard-*")]
            if bool(sizes) != ("fsdp" in source or "tensor" in source):
                problems.append(f"{source}: {len(sizes)} files of shards")
    return problems


@pytest.mark.parametrize(
    "sources",
    [
        *(pytest.param([each], marks=pytest.mark.thorough) for each in ("fsdp and tensor", "zero-1", "one process")),
        *(pytest.param([each], marks=pytest.mark.slow) for each in ("tensor", "fsdp", "replicas", "four stages")),
    ],
)
def test_from_any_mesh_to_any(on_ranks: Run, tmp_path: Path, sources: list[str]) -> None:
    for problems in on_ranks(4, from_any_to_any, folder=str(tmp_path), sources=sources, patience=120.0):
        assert not problems
