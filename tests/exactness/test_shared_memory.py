"""Gradients and parameters whose memory other tensors have, too: nothing may be added to it, or written into it."""

import contextlib
import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from pipework import Pipe
from tests.ranks import held

pytestmark = pytest.mark.one_process("it makes pipes of threads")


def pipe_of(
    layers: Iterable[nn.Module], chunks: int, checkpoint: str = "except_last", schedule: str = "gpipe", **options: Any
) -> Pipe:
    layers = list(layers)
    balance = options.setdefault("balance", [1] * len(layers))
    options = {"loss_fn": nn.functional.mse_loss, "devices": ["cpu"] * len(balance), **options}
    return Pipe(nn.Sequential(*layers), chunks, checkpoint, schedule=schedule, **options)


class Broadcast(nn.Module):
    """A parameter whose gradient comes through a view: PyTorch takes over its memory, that of the loss's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias.view(1).expand(len(x))


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_gradient_with_the_memory_of_that_of_the_loss(checkpoint: str, schedule: str, chunks: int) -> None:
    def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum()

    for layers in ([Broadcast()], [Broadcast(), nn.Identity(), nn.Identity()]):
        pipe = pipe_of(layers, chunks, checkpoint, schedule, loss_fn=summed, loss_reduction="sum")
        for step in range(1, 4):
            pipe(torch.ones(chunks, 1), target=torch.ones(chunks)).backward()
            assert pipe[0].bias.grad == step * chunks


class Axes(nn.Module):
    """Two parameters whose gradients come through views of one tensor, that of the input if there is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.rows.unsqueeze(0) + self.columns.unsqueeze(0))


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("layers", [1, 3])
def test_gradients_that_share_memory(layers: int, checkpoint: str, schedule: str | None, chunks: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    model = nn.Sequential(*[Axes() for _ in range(layers)]).double()
    if layers > 1:
        model[2].rows = model[0].rows  # tied, in another stage
    plain = copy.deepcopy(model)
    for factor in (1.0, 0.5) if schedule else (1.0, 0.5, 1.0):  # steps that add up
        (factor * nn.functional.mse_loss(plain(x), y)).backward()
        for layer in plain:  # PyTorch would add twice, too
            layer.columns.grad = layer.columns.grad.clone()
    loss_fn = nn.functional.mse_loss if schedule else None
    pipe = pipe_of(copy.deepcopy(model), chunks, checkpoint, schedule or "gpipe", loss_fn=loss_fn)
    for factor in (1.0, 0.5):
        loss = pipe(x, target=y) if schedule else nn.functional.mse_loss(pipe(x), y)
        (factor * loss).backward(retain_graph=schedule is None)
    if schedule is None:
        loss.backward()  # once more along the same graph
    for found, wanted in zip(pipe.parameters(), held(plain, pipe).parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-15)


class Projected(nn.Module):
    """A gradient that waits for W, or is kept by a hook, comes to a parameter, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.position = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4))
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + self.position.unsqueeze(0)
        if y.requires_grad:
            y.register_hook(self.kept.append)
        return torch.tanh(y)


class Transposed(nn.Module):
    """In W, its gradient is a view of what other stages still have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("ija->jia", self.weight)


class Added(nn.Module):
    """In W, the gradients of two parameters are one tensor: that of the output, which a hook has kept, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.randn(2, 3, 4))
        self.factors = nn.Parameter(torch.randn(2, 2, 4, 4))
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.baddbmm(self.first, x, self.factors[0]) + torch.baddbmm(self.second, x, self.factors[1])
        if y.requires_grad:
            y.register_hook(self.kept.append)
        return y


class Energy(nn.Module):
    """Differentiates by its input alone: its own parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.linear(point)).sum(), point)
        return x + slope


class EnergyAgain(Energy):
    """Does so in the middle of the pipe's backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def saving(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(Energy.forward(self, x))

        return torch_checkpoint.checkpoint(saving, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-zb", "zb-v", "v-half"])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [(Projected, 4), (Transposed, 8), (Added, 8), (Energy, 8), (EnergyAgain, 8)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_gradients_beside_those_that_wait(kind: type[nn.Module], rows: int, checkpoint: str, schedule: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[layer for _ in range(4) for layer in (kind(), nn.Linear(4, 4))]).double()
    stages = 2 if schedule == "zb-h1" or schedule == "1f1b" else 4
    balance = [1, 16 // stages - 1, *[8 // stages] * (stages - 2)]
    pipe = pipe_of(copy.deepcopy(plain), 4, checkpoint, schedule, balance=balance, devices=["cpu"] * 2)
    for _ in range(3):
        x, y = torch.randn(2, rows, 3, 4, dtype=torch.float64)
        for model in (plain, pipe):
            model.zero_grad()
            for layer in model:
                vars(layer).get("kept", []).clear()
        if kind in (Transposed, Added):  # its parameters have as many rows as a micro-batch
            loss = sum(nn.functional.mse_loss(plain(a), b) / 4 for a, b in zip(x.chunk(4), y.chunk(4), strict=True))
        else:
            loss = nn.functional.mse_loss(plain(x), y)
        loss.backward()
        pipe(x, target=y).backward()
        for found, wanted in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert (found.grad is None) == (wanted.grad is None)
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-13)
        for layer in list(pipe)[::2] if kind is Added else ():
            torch.testing.assert_close(torch.stack(layer.kept).sum(0), layer.first.grad, rtol=1e-10, atol=1e-13)
        if kind is Projected:
            for own, other in zip(list(pipe)[::2], list(plain)[::2], strict=True):
                torch.testing.assert_close(torch.cat(own.kept), other.kept[0], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_parameter_that_is_handed_on_may_not_be_overwritten(schedule: str, checkpoint: str) -> None:
    class Query(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.query.unsqueeze(0).expand(len(x), -1, -1)

    model = nn.Sequential(Query(), nn.ReLU(inplace=True), nn.Linear(4, 4))
    before = model[0].query.detach().clone()
    pipe = pipe_of(model, 2, checkpoint, schedule, balance=[1, 2])
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        pipe(torch.zeros(2, 1), target=torch.zeros(2, 3, 4))
    assert torch.equal(before, pipe[0].query)


def test_a_backward_that_overwrites_what_waits_is_refused() -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0].neg_()

    class Reversed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Reverse.apply(x) + super().forward(x.detach())  # type: ignore[no-any-return, no-untyped-call]

    pipe = pipe_of([nn.Linear(4, 4), Reversed(4, 4), nn.Tanh(), nn.Linear(4, 4)], 4, schedule="zb-h1", balance=[2, 2])
    x = torch.randn(8, 4)  # its first micro-batch shows what can wait
    with pytest.raises(RuntimeError, match="modified by an inplace operation while it waited for W"):
        pipe(x, target=x)


class Doubled(torch.autograd.Function):
    """Overwrites the gradient that it is given, which PyTorch advises against."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].mul_(2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_loss_that_overwrites_its_gradient(schedule: str) -> None:
    def doubled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return Doubled.apply((output * target).sum())  # type: ignore[no-any-return, no-untyped-call]

    plain, x, y = nn.Linear(4, 4).double(), torch.randn(6, 4).double(), torch.randn(6, 4).double()
    pipe = pipe_of([copy.deepcopy(plain)], 3, schedule=schedule, loss_fn=doubled, loss_reduction="sum")
    doubled(plain(x), y).backward()
    pipe(x, target=y).backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_a_forward_may_differentiate_the_graph_of_an_earlier_micro_batch(schedule: str) -> None:
    class Looks(nn.Module):
        def __init__(self, looks: bool) -> None:
            super().__init__()
            self.linear, self.looks = nn.Linear(4, 4), looks
            self.last: tuple[torch.Tensor, torch.Tensor] | None = None
            self.seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x))
            if self.looks and self.last is not None:
                inputs, outputs = self.last
                with contextlib.suppress(RuntimeError):  # its backward is over
                    torch.autograd.grad(outputs.sum(), inputs, retain_graph=True)
                    self.seen += 1
            self.last = (x, y) if x.requires_grad else None
            return y

    gradients: list[list[torch.Tensor]] = []
    for looks in (False, True):
        torch.manual_seed(0)
        layer = Looks(looks)
        pipe = pipe_of([nn.Linear(4, 4), layer, nn.Linear(4, 4)], 4, "never", schedule, balance=[2, 1])
        x = torch.randn(8, 4)
        for _ in range(3):
            layer.last = None
            pipe(x, target=x).backward()
        assert bool(layer.seen) == looks
        gradients.append([parameter.grad for parameter in pipe.parameters()])
    for found, wanted in zip(*gradients, strict=True):
        assert torch.equal(found, wanted)
