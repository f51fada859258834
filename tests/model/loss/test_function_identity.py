"""What is told of a loss function: the same for two makes of the same one, something else for others."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework.model.loss.function_identity import function_identity


class Focal(nn.Module):
    def __init__(self, gamma: float, rank: int = 0) -> None:
        super().__init__()
        self.gamma = gamma
        self.rank = rank
        self.began = time.perf_counter()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().pow(self.gamma).mean()


class Called:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).mean() * self.weight


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend="eager")


def plain(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    return (output - target).mean() * scale


def closing_over(rank: int) -> Callable[..., Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if rank == 0:
            print(output.shape)
        return F.mse_loss(output, target)

    return loss


def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Tensor:
        return function(*arguments)

    return wrapper


def other_plain(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    return (output + target).mean() * scale


other_plain.__qualname__ = plain.__qualname__


ALIKE: dict[str, Callable[[int], Any]] = {
    "nothing": lambda rank: None,
    "a function of PyTorch": lambda rank: F.cross_entropy,
    "a module of PyTorch": lambda rank: nn.CrossEntropyLoss(torch.ones(3), label_smoothing=0.1).train(rank == 0),
    "a lambda": lambda rank: lambda output, target: (output - target).abs().mean(),
    "a closure": closing_over,
    "a partial": lambda rank: functools.partial(F.cross_entropy, ignore_index=3, weight=torch.ones(3)),
    "a partial of one's own": lambda rank: functools.partial(plain, scale=2.0, device=f"cuda:{rank}", rank=rank),
    "a module of one's own": lambda rank: Focal(2.0, rank),
    "an object": lambda rank: Called(2.0),
    "a method": lambda rank: Called(2.0).__call__,
    "compiled": lambda rank: compiled(plain),
    "compiled on one rank": lambda rank: compiled(plain) if rank else plain,
    "a module, compiled on one rank": lambda rank: compiled(nn.MSELoss()) if rank else nn.MSELoss(),
    "decorated": lambda rank: decorated(plain),
    "decorated and compiled": lambda rank: compiled(decorated(plain)) if rank else decorated(plain),
    "scripted": lambda rank: torch.jit.script(nn.MSELoss()),
}
OTHERS: list[tuple[Any, Any]] = [
    (None, F.mse_loss),
    (F.mse_loss, F.l1_loss),
    (nn.MSELoss(), nn.L1Loss()),
    (nn.MSELoss(), nn.MSELoss(reduction="sum")),
    (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=0)),
    (functools.partial(F.cross_entropy, label_smoothing=0.1), functools.partial(F.cross_entropy, label_smoothing=0.2)),
    (functools.partial(plain, scale=1.0), functools.partial(plain, scale=2.0)),
    (lambda a, b: (a - b).abs().mean(), lambda a, b: (a - b).square().mean()),
    (lambda a, b: (a - b).pow(2).mean(), lambda a, b: (a - b).pow(4).mean()),
    (lambda a, b: (a - b).abs().mean(), lambda a, b: (a + b).abs().mean()),
    (lambda a, b: sum(x - 1 for x in (a, b)), lambda a, b: sum(x - 2 for x in (a, b))),
    (compiled(plain), compiled(other_plain)),
    (decorated(plain), decorated(other_plain)),
    (
        functools.partial(compiled(plain), scale=1.0),
        functools.partial(compiled(other_plain), scale=1.0),
    ),
    (Focal(1.0), Focal(2.0)),
    (Called(1.0), Called(2.0)),
]


@pytest.mark.parametrize("kind", ALIKE)
def test_the_same_function_is_told_alike(kind: str) -> None:
    assert function_identity(ALIKE[kind](0)) == function_identity(ALIKE[kind](1))


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_other_functions_are_told_apart(number: int) -> None:
    one, other = OTHERS[number]
    assert function_identity(one) != function_identity(other)
