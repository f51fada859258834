"""What the tests of saving share: a small model, ways to train it, and what it looks like afterwards."""

import hashlib
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipework import HostOptimizer, Pipe
from pipework.saving.files import Checksum

BALANCES = {4: [2, 2, 2, 2], 3: [3, 2, 3], 2: [5, 3], 1: [8]}


class Cut(NamedTuple):
    """How the model is cut, and under which schedule it runs."""

    stages: int
    schedule: str


CUTS = [Cut(stages, schedule) for schedule in ("gpipe", "1f1b") for stages in BALANCES]
CUTS += [Cut(4, "zb-v"), Cut(2, "zb-v")]


def model() -> nn.Sequential:
    layers = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2),
        nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1),
    )  # fmt: skip
    layers[6].bias.requires_grad_(False)
    return layers


TWO = Cut(2, "gpipe")


def make_pipe(cut: Cut = TWO, module: nn.Sequential | None = None) -> Pipe:
    module = model() if module is None else module
    workers = cut.stages // 2 if cut.schedule == "zb-v" else cut.stages
    return Pipe(
        module,
        chunks=4,
        balance=BALANCES[cut.stages],
        devices=["cpu"] * workers,
        schedule=cut.schedule,
        loss_fn=nn.functional.mse_loss,
    )


def trainable(pipe: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in pipe.parameters() if parameter.requires_grad]


def groups(pipe: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, all else does not."""
    return [
        {"params": [p for p in pipe.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in pipe.parameters() if p.ndim == 1], "lr": 0.02},
    ]


OPTIMIZERS = {
    "sgd": lambda pipe: torch.optim.SGD(pipe.parameters(), lr=0.1),
    "momentum": lambda pipe: torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda pipe: torch.optim.Adam(pipe.parameters(), lr=0.01, foreach=False),
    "adam-trainable": lambda pipe: torch.optim.Adam(trainable(pipe), lr=0.01),
    "adam-foreach": lambda pipe: torch.optim.Adam(pipe.parameters(), lr=0.01, foreach=True),
    "adam-tensor-lr": lambda pipe: torch.optim.Adam(pipe.parameters(), lr=torch.tensor(0.01), foreach=False),
    "amsgrad": lambda pipe: torch.optim.Adam(pipe.parameters(), lr=0.01, amsgrad=True),
    "adamw-fused": lambda pipe: torch.optim.AdamW(pipe.parameters(), lr=0.01, fused=True),
    "nadam": lambda pipe: torch.optim.NAdam(pipe.parameters(), lr=0.01),
    "asgd": lambda pipe: torch.optim.ASGD(pipe.parameters(), lr=0.01, t0=1),
    "adafactor": lambda pipe: torch.optim.Adafactor(pipe.parameters(), lr=0.01),
    "rprop": lambda pipe: torch.optim.Rprop(pipe.parameters(), lr=0.01),
    "groups": lambda pipe: torch.optim.AdamW(groups(pipe), lr=0.01),
    "host": lambda pipe: HostOptimizer(groups(pipe), torch.optim.AdamW, lr=0.01, fused=True),
    "named": lambda pipe: torch.optim.AdamW(pipe.named_parameters(), lr=0.01),
}


def train(pipe: Pipe, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> list[dict[str, Tensor]]:
    """Losses, gradients, parameters and buffers of each step. The data are drawn, from three generators."""
    dtype = next(pipe.parameters()).dtype
    seen = []
    for _ in range(steps):
        x = torch.randn(8, 6, dtype=dtype) * random.random()
        loss = pipe(x, target=torch.randn(8, 1, dtype=dtype))
        loss.backward()
        now = {f"{name}.grad": p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        seen.append({"loss": loss.detach(), **now, **snapshot(pipe)})
    return seen


def stir(pipe: Pipe, optimizer: torch.optim.Optimizer | None = None) -> None:
    """A step with made-up gradients, which costs nothing and starts no threads."""
    for parameter in pipe.parameters():
        parameter.grad = torch.randn_like(parameter)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def snapshot(pipe: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def remembered(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, flat."""
    state = optimizer.state_dict()
    flat = {f"{index}/{key}": value for index, each in state["state"].items() for key, value in each.items()}
    flat = {key: value.clone() if isinstance(value, Tensor) else value for key, value in flat.items()}
    return {**flat, **{f"group {i}/{k}": v for i, group in enumerate(state["param_groups"]) for k, v in group.items()}}


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert actual[name].dtype == value.dtype, name
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.iterdir())


def checksum_of(content: bytes) -> Checksum:
    return Checksum(len(content), hashlib.sha256(content).hexdigest())
