"""What works in one process and would train something else in several: it is refused, by name."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pipework import Mesh, Pipe

Run = Callable[..., list[Any]]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def made(mesh: Mesh, model: nn.Sequential | None = None) -> Pipe:
    return Pipe(layers() if model is None else model, 2, mesh=mesh, schedule="1f1b", loss_fn=nn.functional.mse_loss)


def stale(mesh: Mesh) -> None:
    model = layers()
    early = torch.optim.AdamW(model.parameters())
    pipe = made(mesh, model)
    own, every = {id(parameter) for parameter in pipe.parameters()}, list(model.parameters())
    assert [parameter.is_meta for parameter in every] == [id(parameter) not in own for parameter in every]
    pipe(torch.ones(8, 4), target=torch.ones(8, 2)).backward()
    for optimizer in (early, torch.optim.SGD(model.parameters(), lr=1.0)):
        with pytest.raises(RuntimeError, match=rf"in other processes \(rank {1 - mesh.rank}\): .*pipe\.parameters\(\)"):
            optimizer.step()
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="no values in this process"):
        model(torch.ones(8, 4))
    with pytest.raises(RuntimeError, match=r"pipe\.state_dict\(\) has the layers of this process"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"Call pipe\.clip_grad_norm_"):
        clip_grad_norm_(pipe.parameters(), 1.0)
    pipe.clip_grad_norm_(1.0)


def rows() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(32, 4), torch.randn(32, 2))


def other_rows(mesh: Mesh) -> str:
    pipe = made(mesh)
    sampler = DistributedSampler(rows(), len(mesh.ranks), mesh.rank)
    x, y = next(iter(DataLoader(rows(), 8, sampler=sampler)))
    with pytest.raises(ValueError, match="was given other inputs than rank") as error:
        pipe(x, target=y)
    return str(error.value)


def other_targets_later(mesh: Mesh) -> str:
    pipe = made(mesh)
    for step in range(100):
        x, y = torch.ones(8, 4), torch.full((8, 2), float(step if step < 9 else step * 2 + mesh.rank))
        try:
            pipe(x if pipe.is_first else None, target=y)
        except ValueError as error:
            return f"{step} {error}"
    return ""


def right_rows(mesh: Mesh) -> list[int]:
    pipe = made(mesh)
    sampler = pipe.sampler(rows(), seed=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(rows(), 4, sampler=sampler):
            pipe(x, target=y).backward()
    return list(sampler)


def warned(mesh: Mesh) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Pipe(layers(), 1, mesh=mesh)
    return [str(each.message)[:11] for each in caught]


def test_the_wrapped_model_does_not_answer_for_others(on_ranks: Run) -> None:
    on_ranks(2, stale)


def test_other_rows_on_the_ranks_are_seen_in_the_first_step(start: Callable[..., Any]) -> None:
    for rank, ended in enumerate(start(2, other_rows).ended()):
        assert ended.result.startswith(f"rank {rank} was given other inputs than rank {1 - rank} in call 1")
        assert "take pipe.sampler(dataset)" in ended.result


def test_other_targets_in_later_steps_are_seen_now_and_then(start: Callable[..., Any]) -> None:
    for rank, ended in enumerate(start(2, other_targets_later).ended()):
        assert ended.result.startswith(f"31 rank {rank} was given other targets than rank {1 - rank} in call 32")


def test_the_sampler_gives_ranks_the_same_rows_and_replicas_others(on_ranks: Run) -> None:
    assert sorted(on_ranks(2, right_rows)[0]) == list(range(32))
    first, second, third, fourth = on_ranks(4, right_rows, init={"dp": 2})
    assert first == second
    assert third == fourth
    assert sorted(first + third) == list(range(32))


def test_what_all_processes_doubt_is_told_by_one(on_ranks: Run) -> None:
    assert on_ranks(4, warned, init={"dp": 2}) == [["chunks is 1"], [], [], []]
