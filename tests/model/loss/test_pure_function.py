"""Whether a loss function can be called once more: what changes something, or may, is told from what does not."""

import builtins
import logging
import random
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipework.model.loss.pure_function import PureFunction, is_plain

COUNT = 0
SEEN: list[Any] = []
WEIGHTS = torch.ones(4)
CRITERION = nn.CrossEntropyLoss(label_smoothing=0.1)
EPSILON = 1e-6


def counting(output: Tensor, target: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return output.mean()


def helper(output: Tensor, epsilon: float = EPSILON) -> Tensor:
    return torch.sqrt(output.square().mean() + epsilon)


def with_a_default(output: Tensor, target: Tensor, seen: list[Any] = []) -> Tensor:  # noqa: B006
    seen.append(len(output))
    return output.mean()


def of_its_own(output: Tensor, target: Tensor) -> Tensor:
    of_its_own.calls += 1  # type: ignore[attr-defined]
    return output.mean()


def importing(output: Tensor, target: Tensor) -> Tensor:
    import sys

    sys.path.append("")
    return output.mean()


def counting_in_a_closure() -> Callable[..., Any]:
    count = 0

    def counted(output: Tensor, target: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return output.mean()

    return counted


def appending_in_a_closure() -> Callable[..., Any]:
    seen: list[int] = []
    return lambda output, target: (seen.append(1), output.mean())[1]


def drawing_from_a_generator() -> Callable[..., Any]:
    generator = torch.Generator()
    return lambda output, target: output.mean() + torch.rand((), generator=generator)


class Shared:
    calls: list[int] = []  # noqa: RUF012

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls.append(1)
        return output.mean()


class Logging:
    def __init__(self) -> None:
        self.log = logging.getLogger("loss")

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.log.info("called")
        return output.mean()


class OtherMethod:
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.printed(output.mean())

    def printed(self, value: Tensor) -> Tensor:
        print(value)
        return value


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *args: None)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return output.mean()


CHANGING: dict[str, Callable[..., Any]] = {
    "a global variable": counting,
    "a variable of a closure": counting_in_a_closure(),
    "a list of a closure": appending_in_a_closure(),
    "a global list": lambda output, target: (SEEN.append(1), output.mean())[1],
    "a default": with_a_default,
    "an attribute of its own": of_its_own,
    "an import": importing,
    "print": lambda output, target: (print(output), output.mean())[1],
    "print of a module": lambda output, target: (builtins.print(output), output.mean())[1],
    "logging": lambda output, target: (logging.info("called"), output.mean())[1],
    "numpy": lambda output, target: output.mean() * np.random.rand(),
    "random": lambda output, target: output.mean() * random.random(),
    "time": lambda output, target: output.mean() * time.time(),
    "a collective": lambda output, target: (dist.all_reduce(output), output.mean())[1],
    "a collective through torch": lambda output, target: (torch.distributed.all_reduce(output), output.mean())[1],
    "a seed": lambda output, target: (torch.manual_seed(1), output.mean())[1],
    "a setting": lambda output, target: (torch.set_num_threads(1), output.mean())[1],
    "data of a tensor": lambda output, target: (WEIGHTS.data.add_(1), output.mean())[1],
    "a hook of a tensor": lambda output, target: (WEIGHTS.register_hook(print), output.mean())[1],
    "a generator": drawing_from_a_generator(),
    "a function that prints": lambda output, target: OtherMethod().printed(output.mean()),
    "a nested function": lambda output, target: sum(print(row) or row.mean() for row in output),
    "a bound list": partial(lambda output, target, seen: output.mean(), seen=[]),
    "a list of a class": Shared(),
    "a logger": Logging(),
    "another method": OtherMethod(),
    "a bound method": OtherMethod().printed,
    "a hook": Hooked(),
    "of numpy": np.dot,
    "of Python": open,
    "a cached function": lru_cache(helper),
}


@pytest.mark.parametrize("name", CHANGING)
def test_may_be_noticed(name: str) -> None:
    assert PureFunction.of(CHANGING[name], 1000) is None


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    scores = F.normalize(output, dim=-1) @ F.normalize(target, dim=-1).T
    labels = torch.arange(len(output), device=output.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def nested(output: Any, target: Any) -> Tensor:
    parts = [F.mse_loss(each, target[name]) for name, each in output.items()]
    if not parts:
        raise ValueError("no output")
    with torch.no_grad():
        scale = max(part.item() for part in parts)
    return torch.stack(parts).sum() / (scale + EPSILON)


def closure() -> Callable[..., Any]:
    weights, names = torch.ones(4), ("a", "b")
    return lambda output, target: F.cross_entropy(output, target, weight=weights) / len(names)


class Keeping:
    def __init__(self) -> None:
        self.mean = 0.0
        self.history: list[float] = []

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + output.mean().item()
        self.history.append(self.mean)
        return output.mean()


PURE: dict[str, Callable[..., Any]] = {
    "a lambda": lambda output, target: ((output - target) ** 2).mean().sqrt(),
    "a sum": lambda output, target: (output - target).abs().sum(),
    "a helper": lambda output, target: helper(output - target),
    "of torch": contrastive,
    "nested": nested,
    "a closure": closure(),
    "a module of PyTorch": lambda output, target: CRITERION(output, target).sqrt(),
    "a module made inside": lambda output, target: nn.MSELoss()(output, target).sqrt(),
    "a partial": partial(lambda output, target, power: (output - target).pow(power).mean(), power=2),
    "an operator": torch.dist,
    "an object": Keeping(),
    "compiled": torch.compile(helper, backend="eager"),
}


@pytest.mark.parametrize("name", PURE)
def test_cannot_be_noticed(name: str) -> None:
    assert PureFunction.of(PURE[name], 1000) is not None


def test_tensors_that_are_changed_in_place() -> None:
    pure = PureFunction.of(lambda output, target: (output * WEIGHTS).mean(), 0)
    assert pure is not None
    assert not pure.has_changed_tensors
    WEIGHTS.mul_(1)
    assert pure.has_changed_tensors


def test_an_object_is_copied_and_a_function_is_not_compiled() -> None:
    keeping, x = Keeping(), torch.ones(2)
    pure = PureFunction.of(keeping, 0)
    assert pure is not None
    assert pure.uncompiled()(x, x) == 1
    assert keeping.history == []
    compiled = PureFunction.of(torch.compile(helper, backend="eager"), 0)
    assert compiled is not None
    assert compiled.uncompiled().func is helper  # type: ignore[attr-defined]


def test_plain_values() -> None:
    assert is_plain((1, "a", None, (torch.float32, 2.0)))
    assert not is_plain(([],))
