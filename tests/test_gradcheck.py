"""Every custom autograd function of the project, checked against finite differences through whole pipes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from pipework import NoChunk, Pipe, PipeSequential, pop, skippable, stash
from pipework.skip import Namespace

# Finite differences compute losses of which none goes backward.
pytestmark = pytest.mark.filterwarnings("ignore:loss.backward.. was called on none:pipework.PipeWarning")


def check(pipe: Pipe, *inputs: Tensor, call: Callable[..., Any] | None = None, fast_mode: bool = True) -> None:
    """Compares the gradients of all inputs and all parameters; in fast mode a random projection of the Jacobian.

    `gradcheck` perturbs in place what it is given, hence the pipe's own parameters can be given beside the inputs.
    """
    parameters = tuple(pipe.parameters())

    def run(*arguments: Tensor) -> Any:
        torch.manual_seed(0)
        return (call or pipe)(*arguments[: len(inputs)])

    assert gradcheck(run, (*inputs, *parameters), fast_mode=fast_mode)


def rows(count: int, width: int = 3, requires_grad: bool = True) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64, requires_grad=requires_grad)


@skippable(stash=["skip"])
class Fork(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(super().forward(x))
        yield stash("skip", y)
        return y


@skippable(pop=["skip"])
class Join(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (yield pop("skip"))


def simple() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2), nn.Sigmoid())


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.ELU(inplace=True), nn.Linear(3, 2), nn.ELU(inplace=True))


def with_skips() -> nn.Sequential:
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Fork(3, 3).isolate(outer), Fork(3, 3).isolate(inner), Join(3, 3).isolate(inner), Join(3, 3).isolate(outer)
    )


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.4), nn.Linear(3, 3), nn.Dropout(0.4))


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.0), nn.Tanh(), nn.Linear(3, 2))


def tied() -> nn.Sequential:
    shared = nn.Linear(3, 3)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh())


MODELS = [simple, in_place, with_skips, with_dropout, with_batch_norm, tied]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("way", ["outside", "1f1b"], indirect=True)
def test_inputs_and_parameters(way: Any, make: Callable[[], nn.Sequential], checkpoint: str) -> None:
    pipe = way.pipe(make().double(), 2, checkpoint, balance=[1, 3])
    target = rows(4, 1, requires_grad=False).flatten()
    loss = (lambda x: way.loss(pipe, x, target)) if way.inside else None
    check(pipe, rows(4), call=loss, fast_mode=make is not simple)


def test_an_input_without_a_gradient_and_one_given_whole() -> None:
    class Weigh(nn.Linear):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return (super().forward(x) * weight).square().mean()

    pipe = Pipe(PipeSequential(Weigh(3, 3), nn.Tanh()).double(), 2, balance=[1, 1], devices=["cpu"] * 2)
    pipe[0].bias.requires_grad_(False)
    check(pipe, rows(3, requires_grad=False), rows(1), call=lambda x, weight: pipe(x, NoChunk(weight)))


def test_a_second_derivative_is_refused_in_words(way: Any) -> None:
    pipe = way.pipe(simple().double(), 2, balance=[1, 1, 1, 1])
    x, target = rows(3), rows(3, 1, requires_grad=False).flatten()
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice \(create_graph=True\)"):
        gradgradcheck(lambda x: way.loss(pipe, x, target), (x,))
    with pytest.raises(RuntimeError, match="Compute a gradient penalty on the un-partitioned module"):
        torch.autograd.grad(way.loss(pipe, x, target), x, create_graph=True)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    check(pipe, x, call=lambda x: way.loss(pipe, x, target))


def test_forward_mode_is_refused_by_pytorch() -> None:
    pipe = Pipe(simple().double(), 2, balance=[2, 2], devices=["cpu"] * 2)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="implement the jvp function"):
        pipe(forward_ad.make_dual(rows(4), rows(4, requires_grad=False)))
