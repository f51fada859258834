"""Replicas go on with what was theirs: random numbers, and where their data were."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipework import Mesh, Pipe, load_checkpoint, save_checkpoint

Run = Callable[..., list[Any]]


def make(mesh: Mesh | None, workers: int = 1) -> tuple[Pipe, torch.optim.Optimizer, Any]:
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1)]
    where: dict[str, Any] = {"devices": ["cpu"] * workers} if mesh is None else {"mesh": mesh}
    pipe = Pipe(nn.Sequential(*layers), 2, schedule="1f1b", loss_fn=nn.functional.mse_loss, **where)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    return pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def drawn() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def train(mesh: Mesh, folder: str) -> list[dict[str, Any]]:
    """Four steps, or what is left of them; each process has random numbers of its own, beside its replica's."""
    rows = torch.randn(200, 6, generator=torch.Generator().manual_seed(7))
    pipe, optimizer, scheduler = make(mesh)
    seed(pipe.data_parallel_rank)
    found = load_checkpoint(folder, pipe, optimizer, scheduler=scheduler)
    step = found.step if found else 0
    # Of the last process of a replica alone, which reads the targets, "targets" is something else.
    mine = {"row": 100 * pipe.data_parallel_rank, "targets": mesh.rank}
    if found:
        mine = found.data_position
    seen = []
    while step < 4:
        x = rows[mine["row"] :][:8] * random.random()
        mine["row"] += 8
        torch.rand(mesh.rank)  # other numbers of them on each process
        loss = pipe(x if pipe.is_first else None, target=x[:, :1] if pipe.is_last else None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        state = {name: tensor.flatten().tolist() for name, tensor in pipe.state_dict().items()}
        rate = optimizer.param_groups[0]["lr"]
        seen.append({"step": step, "loss": loss.item(), "state": state, "mine": dict(mine), "rate": rate})
        if step == 2:
            save_checkpoint(folder, pipe, optimizer, step=step, scheduler=scheduler, data_position=mine)
    return [*seen, {"drawn": drawn()}]


@pytest.mark.thorough
def test_they_go_on_with_the_same_bits(on_ranks: Run, tmp_path: Path) -> None:
    whole = on_ranks(4, train, init={"dp": 2}, folder=str(tmp_path))
    rest = on_ranks(4, train, init={"dp": 2}, folder=str(tmp_path))
    assert [[each.get("step") for each in run] for run in rest] == [[3, 4, None]] * 4
    assert rest == [run[2:] for run in whole]
    assert whole[0][-1] != whole[2][-1], "replicas draw other numbers"
    assert [run[0]["mine"]["targets"] for run in rest] == [0, 1, 2, 3]
    assert [run[0]["state"] for run in rest[:2]] == [run[0]["state"] for run in rest[2:]], "they train one model"


def save(mesh: Mesh, folder: str) -> list[Any]:
    pipe, optimizer, _ = make(mesh)
    seed(mesh.rank)
    drawn()
    position = {"row": 100 * (1 + mesh.rank)}
    save_checkpoint(folder, pipe, optimizer, step=1, data_position=position)
    return [*drawn(), position]


def load(mesh: Mesh | None, folder: str, seeds: list[list[int]]) -> list[list[Any]]:
    pipe, _, _ = make(mesh)
    return [loaded(pipe, folder, each[0 if mesh is None else mesh.rank]) for each in seeds]


def loaded(pipe: Pipe, folder: str, number: int) -> list[Any]:
    seed(number)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipework").addHandler(handler)
    try:
        found = load_checkpoint(folder, pipe)
    finally:
        logging.getLogger("pipework").removeHandler(handler)
    assert found is not None
    return [*drawn(), found.data_position, [text for text in said if "replica" in text]]


@pytest.mark.thorough
def test_other_numbers_of_replicas(on_ranks: Run, tmp_path: Path) -> None:
    one, two = on_ranks(2, save, init={"dp": 2}, folder=str(tmp_path))
    assert one[:3] != two[:3]
    ((*rest, said),) = load(None, str(tmp_path), [[5]])
    assert rest == one
    assert len(said) == 1
    assert "random states and others of ranks that are not here any more are left out" in said[0]

    every = on_ranks(3, load, init={"dp": 3}, folder=str(tmp_path), seeds=[[5, 5, 5], [5, 6, 7]])
    first, second, third = (each[0] for each in every)
    assert [first[:4], second[:4], third[:4]] == [one, two, one]
    assert "the data position of replica 0, and also its random states" in first[4][0]
    assert not second[4]
    assert not third[4], "one process says it"

    first, second, third = (each[1] for each in every)
    assert [first[:4], second[:4]] == [one, two]
    seed(7)
    assert third[:4] == [*drawn(), {"row": 100}]
    assert "the data position of replica 0, and keep their own random states" in first[4][0]
