"""After a call that has failed, all ranks have the same generator: a model built next without a seed is the same."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Mesh, Pipe, PipelineError

ERRORS = (TypeError, ValueError, ZeroDivisionError, PipelineError)


class Fails(nn.Module):
    """Once the pipe has trained, fails in a forward or in a backward, `after` so many seconds."""

    def __init__(self, where: str, after: float = 0.0) -> None:
        super().__init__()
        self.where, self.after, self.is_ready = where, after, False

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            self.fail()
        elif x.requires_grad:
            x.register_hook(self.fail)
        return x

    def fail(self, _: object = None) -> None:
        if self.is_ready:
            time.sleep(self.after)
            raise ZeroDivisionError


def made(mesh: Mesh, *first: nn.Module, last: tuple[nn.Module, ...] = ()) -> Pipe:
    """Each rank has one of the linear layers, and has made a call."""
    begin, end = nn.Sequential(nn.Linear(4, 4), *first), nn.Sequential(*last, nn.Linear(4, 4))
    between = [nn.Linear(4, 4) for _ in mesh.ranks[2:]]
    layers = nn.Sequential(begin, *between, end)
    pipe = Pipe(layers, 2, mesh=mesh, schedule="1f1b", loss_fn=nn.functional.mse_loss)
    pipe(X, target=X).backward()
    for layer in (*first, *last):
        layer.is_ready = True  # type: ignore[assignment]
    return pipe


X = torch.ones(8, 4)


def without_inputs(mesh: Mesh) -> None:
    made(mesh)(None, target=X)


def without_inputs_while_others_are_late(mesh: Mesh) -> None:
    pipe = made(mesh)
    time.sleep(0.0 if pipe.is_first else 0.7)
    pipe(None, target=X)


def other_target(mesh: Mesh) -> None:
    made(mesh)(X, target=X[:3])


def another_mode(mesh: Mesh) -> None:
    pipe = made(mesh)
    with torch.set_grad_enabled(pipe.is_first):
        pipe(X, target=X)


def in_a_layer(mesh: Mesh) -> None:
    made(mesh, last=(Fails("forward"),))(X, target=X)


def in_a_layer_while_one_is_late(mesh: Mesh) -> None:
    """The first and the last rank begin the call without the one between them."""
    pipe = made(mesh, Fails("forward", after=0.3))
    time.sleep(0.0 if pipe.is_first or pipe.is_last else 1.0)
    pipe(X, target=X)


def in_an_evaluation_that_draws(mesh: Mesh) -> None:
    pipe = made(mesh, last=(nn.Dropout(), Fails("forward", after=0.1)))
    pipe.training = False
    with torch.no_grad():
        pipe(X)


def after_others_were_done(mesh: Mesh) -> None:
    """The last rank draws for its next call already."""
    pipe = made(mesh, Fails("backward", after=0.5))
    for _ in range(2):
        pipe(torch.randn(8, 4), target=torch.randn(8, 4)).backward()


BODIES = [
    without_inputs,
    without_inputs_while_others_are_late,
    other_target,
    another_mode,
    in_a_layer,
    in_a_layer_while_one_is_late,
    in_an_evaluation_that_draws,
    after_others_were_done,
]


def every_body(mesh: Mesh) -> dict[str, list[float]]:
    """For each what the rank draws next."""
    drawn = {}
    for number, body in enumerate(BODIES):
        torch.manual_seed(number)
        with pytest.raises(ERRORS):
            body(mesh)
        drawn[body.__name__] = nn.Linear(1, 1).weight.flatten().tolist()
    return drawn


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_built_after_a_failed_call_is_the_same_on_all_ranks(
    on_ranks: Callable[..., list[Any]], ranks: int
) -> None:
    drawn = on_ranks(ranks, every_body)
    assert drawn == drawn[:1] * ranks
