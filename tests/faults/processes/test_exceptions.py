"""Exceptions of the user's own code on one rank: between steps, in a layer, in the loss, and before a long cleanup."""

import time

import pytest
import torch
from torch import Tensor, nn

from pipework import Mesh, Pipe
from tests.faults.processes.training import BOUND, PATIENCE, Failing, mean_square, note_strike, noting, small_pipe


def fails_between_steps(mesh: Mesh, folder: str) -> None:
    """Outside of the pipe nobody can report an exception but the end of the program itself."""
    pipe, x = small_pipe(mesh), torch.randn(4, 8)
    with noting(folder, mesh.rank):
        for step in range(3):
            if mesh.rank == 1 and step == 2:
                note_strike(folder, 1)
                raise LookupError("no more data")
            pipe(x, target=x).backward()


def test_between_two_steps(failing: Failing) -> None:
    outcome = failing(2, "", body=fails_between_steps)
    assert outcome.raised[1].type == "LookupError"
    error = outcome.raised[0]
    assert (error.rank, error.kind) == (1, "left")
    assert "rank 1 (stage 1) left after call 2 (training step) with LookupError: no more data" in error.text
    assert "rank 0 (stage 0) is in call 3 (training step)" in error.text
    assert [each.code for each in outcome.ended] == [71, 70]
    assert outcome.seconds <= BOUND * PATIENCE


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x.detach() == 0).all():
            raise ZeroDivisionError("all zero")
        return x


def bad_loss(output: Tensor, target: Tensor) -> Tensor:
    if target[0, 0] == 7:
        raise ArithmeticError("seven")
    return mean_square(output, target)


def fails(mesh: Mesh, folder: str, where: str) -> None:
    """In a layer or in the loss, after a step that was right."""
    layers = nn.Sequential(nn.Linear(8, 8), Odd() if where == "layer" else nn.Tanh())
    pipe = Pipe(layers, chunks=2, loss_fn=bad_loss, mesh=mesh, schedule="1f1b")
    x = torch.randn(4, 8)
    try:
        with noting(folder, mesh.rank):
            pipe(x, target=x).backward()
            if where == "layer":
                for parameter in pipe.parameters():
                    parameter.data.zero_()
            note_strike(folder, mesh.rank)
            pipe(x, target=torch.full_like(x, 7))
    except ArithmeticError:
        time.sleep(30)
        raise


@pytest.mark.parametrize(
    ("where", "error", "shown"),
    [
        ("layer", "ZeroDivisionError: all zero", 'raise ZeroDivisionError("all zero")'),
        ("loss", "ArithmeticError: seven", "in bad_loss"),
    ],
)
def test_in_a_layer_or_in_the_loss_of_a_rank_that_lingers(failing: Failing, where: str, error: str, shown: str) -> None:
    outcome = failing(2, "", body=fails, but=[1], where=where)
    own, other = outcome.raised[1], outcome.raised[0]
    assert f"{own.type}: {own.text}" == error
    assert (other.rank, other.where) == (1, "stage 1, micro-batch 0, action F")
    assert error in other.text
    traceback = other.traceback_text or ""
    assert shown in traceback
    assert "stage_forward.py" not in traceback
    assert ("in layer '1' (Odd)" in traceback) == (where == "layer")
    assert outcome.seconds <= BOUND * PATIENCE
    assert outcome.ended[0].code == 71
