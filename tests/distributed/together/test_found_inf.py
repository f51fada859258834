"""An overflow on one rank is one on all, also on those that have no gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Mesh, Pipe

Run = Callable[..., list[Any]]


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Overflowing(nn.Module):
    """Its gradient, and no other, is infinite in the second training step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (self.weight * torch.inf) * 0 if self.calls == 2 else x * self.weight


def model(kind: str) -> nn.Sequential:
    return {
        "no parameters in the last": nn.Sequential(Overflowing(), nn.Tanh()),
        "no parameters in the first": nn.Sequential(nn.Tanh(), Overflowing()),
        "frozen first": nn.Sequential(nn.Linear(3, 3).requires_grad_(False), Overflowing()),
        "frozen last": nn.Sequential(Overflowing(), nn.Linear(3, 3).requires_grad_(False)),
        "empty last": nn.Sequential(Overflowing(), Empty()),
        "sparse first": nn.Sequential(Looking(), Overflowing()),
    }[kind]


class Empty(nn.Module):
    """Has a gradient without a number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


class Looking(nn.Module):
    """Has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table(torch.arange(len(x)))


KINDS = ("no parameters in the last", "no parameters in the first", "frozen first", "frozen last", "empty last",
         "sparse first")  # fmt: skip


def train(mesh: Mesh, accumulate: int) -> list[list[Any]]:
    found = []
    for kind in KINDS:
        torch.manual_seed(1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        pipe = Pipe(model(kind), mesh=mesh, loss_fn=square, balance=[1, 1], grad_scaler=scaler)
        learning = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(learning, lr=0.0) if learning else None
        x, y = torch.randn(4, 3), torch.randn(4, 3)
        scales, infinite, gradients = [], [], []
        for _ in range(4):
            for _ in range(accumulate):
                scaler.scale(pipe(x, target=y) / accumulate).backward()
            infinite.append(any(p.grad is not None and not _finite(p.grad) for p in learning))
            if optimizer is not None:
                scaler.unscale_(optimizer)
                gradients.append([parameter.grad.to_dense().clone() for parameter in learning])
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            scales.append(scaler.get_scale())
        if gradients:  # those of another scale, which is taken out again
            assert all(map(torch.equal, gradients[2], gradients[3])), kind
        found.append([kind, scales, infinite])
    return found


def _finite(gradient: Tensor) -> bool:
    return bool(gradient.to_dense().isfinite().all())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_reaches_all_scalers(on_ranks: Run, accumulate: int) -> None:
    both = on_ranks(2, train, accumulate=accumulate)
    second = 1 if accumulate == 1 else 0  # the step with the second call
    for first, last in zip(*both, strict=True):
        kind, scales, _ = first
        factors = [0.5 if step == second else 2.0 for step in range(4)]
        expected = [1024.0 * torch.tensor(factors[: n + 1]).prod().item() for n in range(4)]
        assert scales == last[1] == expected, kind
    infinite = {each[0]: (each[2][second], other[2][second]) for each, other in zip(*both, strict=True)}
    assert infinite["sparse first"] == (True, True)
    assert infinite["frozen first"] == (False, True)
    assert infinite["no parameters in the last"] == (True, False)


class Once(Overflowing):
    """Learns in its first forward only, and never overflows."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight if self.calls == 1 else x * 1


def accumulate_once(mesh: Mesh) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipe = Pipe(nn.Sequential(Once(), Overflowing()), mesh=mesh, loss_fn=square, balance=[1, 1], grad_scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(2):
        scaler.scale(pipe(torch.randn(4, 3), target=torch.randn(4, 3))).backward()
    scaler.step(optimizer)
    scaler.update()
    (weight,) = pipe.parameters()
    return [*weight.tolist(), scaler.get_scale()]


def test_who_has_only_earlier_gradients_skips_the_step_too(on_ranks: Run) -> None:
    assert on_ranks(2, accumulate_once) == [[1.0, 1.0, 1.0, 2.0]] * 2
