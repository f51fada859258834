"""An overflow on one rank is one on all, also on those that have no gradients."""

import pytest
import torch
from torch import Tensor, nn

from pipework import Mesh, Pipe
from tests.distributed.together.alike import of_all_ranks, square
from tests.jobs import runs_on


class Overflowing(nn.Module):
    """Its gradient, and no other, is infinite in the second training step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (self.weight * torch.inf) * 0 if self.calls == 2 else x * self.weight


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


def frozen() -> nn.Module:
    return nn.Linear(3, 3).requires_grad_(False)


# Two layers, and on which ranks a gradient is infinite.
MODELS = {
    "no parameters in the last": lambda: ((Overflowing(), nn.Tanh()), [True, False]),
    "no parameters in the first": lambda: ((nn.Tanh(), Overflowing()), [False, True]),
    "frozen first": lambda: ((frozen(), Overflowing()), [False, True]),
    "frozen last": lambda: ((Overflowing(), frozen()), [True, False]),
    "empty last": lambda: ((Overflowing(), Empty()), [True, False]),
    "sparse first": lambda: ((Looking(), Overflowing()), [True, True]),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("accumulate", [1, 2])
@runs_on(2)
def test_an_overflow_reaches_all_scalers(mesh: Mesh, kind: str, accumulate: int) -> None:
    layers, infinite = MODELS[kind]()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    pipe = Pipe(nn.Sequential(*layers), mesh=mesh, loss_fn=square, balance=[1, 1], grad_scaler=scaler)
    learning = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.0) if learning else None
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    expected, gradients = 1024.0, []
    for step in range(4):
        for _ in range(accumulate):
            scaler.scale(pipe(x, target=y) / accumulate).backward()
        overflows = step == 2 - accumulate  # the step with the second call
        if overflows:
            found = any(p.grad is not None and not p.grad.to_dense().isfinite().all() for p in learning)
            assert of_all_ranks(found) == infinite
        if optimizer is not None:
            scaler.unscale_(optimizer)
            gradients.append([parameter.grad.to_dense().clone() for parameter in learning])
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        expected *= 0.5 if overflows else 2.0
        assert scaler.get_scale() == expected
    if gradients:  # those of another scale, which is taken out again
        assert all(map(torch.equal, gradients[2], gradients[3]))


class Once(Overflowing):
    """Learns in its first forward only, and never overflows."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight if self.calls == 1 else x * 1


@runs_on(2)
def test_who_has_only_earlier_gradients_skips_the_step_too(mesh: Mesh) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipe = Pipe(nn.Sequential(Once(), Overflowing()), mesh=mesh, loss_fn=square, balance=[1, 1], grad_scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(2):
        scaler.scale(pipe(torch.randn(4, 3), target=torch.randn(4, 3))).backward()
    scaler.step(optimizer)
    scaler.update()
    (weight,) = pipe.parameters()
    assert [*weight.tolist(), scaler.get_scale()] == [1.0, 1.0, 1.0, 2.0]
