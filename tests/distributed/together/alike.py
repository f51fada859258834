"""What test bodies on ranks share: a pipe of ranks beside one of threads, and errors of which other ranks hear."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipework import Mesh, Pipe, PipelineError


class Tied(nn.Module):
    """Multiplies by a weight that other layers have, too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def refused(words: str | None, *kinds: type[BaseException]) -> Any:
    """An error that one rank raises first, so that others may hear of it as of its failure."""
    return pytest.raises((*(kinds or (ValueError,)), PipelineError), match=words)


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank has here, on every rank."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def both(module: nn.Sequential, mesh: Mesh, chunks: int = 4, *args: Any, **options: Any) -> tuple[Pipe, Pipe]:
    """A pipe of this mesh, and one of threads of a copy of the module."""
    threads = Pipe(copy.deepcopy(module), chunks, *args, devices=["cpu"] * len(mesh.ranks), **options)
    return Pipe(module, chunks, *args, mesh=mesh, **options), threads


def whole(tensor: Tensor | None) -> Tensor | None:
    """A tensor with what other ranks have of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def other_gradients(model: nn.Module, reference: nn.Module) -> list[str]:
    """The parameters here whose gradients are not those of the reference: the same bits in the same shards."""
    named = dict(reference.named_parameters(remove_duplicate=False))
    return [name for name, each in model.named_parameters() if not _same(each.grad, named[name].grad)]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.placements == other.placements and torch.equal(one.to_local(), other.to_local())
    return torch.equal(whole(one), whole(other))


def train_alike(pipes: tuple[nn.Module, nn.Module], *inputs: Any, target: Any, seed: int = 1) -> Tensor:
    """One step of both: the loss, and the gradients of all that is here, are the same to the last bit."""
    losses = []
    for pipe in pipes:
        torch.manual_seed(seed)
        losses.append(pipe(*inputs, target=target))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert other_gradients(*pipes) == []
    return losses[0]
