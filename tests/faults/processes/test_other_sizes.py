"""What four ranks have saved, one, two and three go on with, as processes and as threads, to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Mesh, Pipe, load_checkpoint, save_checkpoint

Run = Callable[..., list[Any]]


def make(stages: int, mesh: Mesh | None = None, schedule: str = "1f1b", seed: int = 0) -> tuple[Pipe, Any]:
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1))]
    where: dict[str, Any] = {"devices": ["cpu"] * stages} if mesh is None else {"mesh": mesh}
    pipe = Pipe(nn.Sequential(*layers), chunks=4, schedule=schedule, loss_fn=functional.mse_loss, **where)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.01)


def step(pipe: Pipe, optimizer: Any) -> None:
    x = torch.randn(16, 8)
    pipe(x, target=x.roll(1, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def gradients(pipe: Pipe, optimizer: Any) -> dict[str, list[float]]:
    """Of the next step, and the parameters after it; exact, as JSON keeps all bits of a float."""
    x = torch.randn(16, 8)
    pipe(x, target=x.roll(1, 1)).backward()
    found: dict[str, Tensor | None] = {name: each.grad for name, each in pipe.named_parameters()}
    optimizer.step()  # to which all that it remembers contributes
    found |= {f"{name} after": each for name, each in pipe.named_parameters()}
    return {name: each.flatten().tolist() for name, each in found.items() if each is not None}


def save(mesh: Mesh, folder: str) -> dict[str, list[float]]:
    pipe, optimizer = make(4, mesh)
    for _ in range(3):
        step(pipe, optimizer)
    save_checkpoint(folder, pipe, optimizer, step=3)
    return gradients(pipe, optimizer)


def load(mesh: Mesh | None, folder: str, stages: int, schedule: str = "1f1b") -> dict[str, list[float]]:
    pipe, optimizer = make(stages, mesh, schedule, seed=5)
    found = load_checkpoint(folder, pipe, optimizer)
    assert found is not None
    assert found.step == 3
    return gradients(pipe, optimizer)


def merged(parts: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: gradient for part in parts for name, gradient in part.items()}


@pytest.mark.thorough
def test_any_number_of_workers_goes_on(on_ranks: Run, tmp_path: Path) -> None:
    expected = merged(on_ranks(4, save, folder=str(tmp_path)))
    assert len(expected) == 2 * 16
    for schedule in ("1f1b", "gpipe"):
        for stages in (1, 2, 3):
            assert load(None, str(tmp_path), stages, schedule) == expected
    for ranks in (1, 2, 3):
        assert merged(on_ranks(ranks, load, folder=str(tmp_path), stages=ranks)) == expected
