"""Input that makes no sense is refused with its own error where it is given, and all other ranks learn of it."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipework import Mesh, MicroBatches, Pipe
from tests.faults.processes.training import BOUND, PATIENCE, Failing, mean_square, model, note_error

GOOD = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))  # the same on all ranks
BAD = {
    "no tensor": (0, ("text",), GOOD, "TypeError", "do not have any tensors"),
    "nothing": (0, (None,), GOOD, "TypeError", "do not have any tensors"),
    "a number": (0, (torch.tensor(3.0),), GOOD, "ValueError", "dimension"),
    "other rows": (
        1,
        (GOOD,),
        GOOD[:3],
        "ValueError",
        "the inputs on rank 0 have 4 rows and a target tensor on rank 1 has shape (3, 8): wanted as many rows. Give "
        "all ranks of a pipe the same",
    ),
    "other micro-batches": (
        1,
        (MicroBatches([GOOD] * 3),),
        MicroBatches([GOOD] * 2),
        "ValueError",
        "have 3 micro-batches and the target has 2",
    ),
    "a target to split": (1, (MicroBatches([GOOD]),), GOOD, "ValueError", "the target has tensors outside of MicroB"),
    "a target that is split": (1, (GOOD,), MicroBatches([GOOD]), "TypeError", "MicroBatches and the inputs are not"),
    "differentiable target": (1, (GOOD,), GOOD.clone().requires_grad_(), "ValueError", "requires a gradient"),
    "other width": (0, (torch.randn(4, 7),), GOOD, "RuntimeError", "cannot be multiplied"),
    "meta": (0, (GOOD.to("meta"),), GOOD, "NotImplementedError", "meta"),
}


def train(mesh: Mesh, folder: str, what: str) -> None:
    pipe = Pipe(model(), chunks=2, loss_fn=mean_square, mesh=mesh, schedule="1f1b")
    _, inputs, target, _, _ = BAD[what]
    try:
        pipe(GOOD, target=GOOD).backward()  # inside: the other rank may fail before this one is done with it
        Path(folder, f"struck.{mesh.rank}").write_text(str(time.time()))
        # A rank is given what is its own alone.
        pipe(*(inputs if pipe.is_first else (None,)), target=target if pipe.is_last else None)
    except BaseException as error:
        note_error(folder, mesh.rank, error)
        raise


@pytest.mark.parametrize(
    "what",
    [
        "no tensor",
        "other rows",
        *(pytest.param(each, marks=pytest.mark.slow) for each in sorted({*BAD} - {"no tensor", "other rows"})),
    ],
)
def test_bad_input(failing: Failing, what: str) -> None:
    at, _, _, kind, words = BAD[what]
    outcome = failing(2, "", body=train, what=what)
    own, other = outcome.raised[at], outcome.raised[1 - at]
    assert own.type == kind
    assert words in own.text
    assert (other.type, other.rank, other.kind) == ("PipelineError", at, "error")
    assert own.text.splitlines()[0] in other.text
    assert outcome.seconds <= BOUND * PATIENCE
    codes = {at: 70, 1 - at: 71}
    assert [each.code for each in outcome.ended] == [codes[0], codes[1]]


def sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def few_rows(mesh: Mesh) -> list[Any]:
    pipe = Pipe(model(), chunks=4, loss_fn=mean_square, mesh=mesh, schedule="1f1b")
    losses = []
    for rows in (2, 1):
        loss = pipe(GOOD[:rows], target=GOOD[:rows])
        loss.backward()
        losses.append(loss.item())
    with pytest.raises(ValueError, match="pipe"):  # all ranks see by themselves that there is no target
        pipe(GOOD)
    losses.append(pipe(GOOD, target=GOOD).item())
    with torch.no_grad():
        assert pipe(GOOD[:0], outputs="all").shape == (0, 8)
    summed = Pipe(model(), chunks=4, loss_fn=sum_of_squares, loss_reduction="sum", mesh=mesh, schedule="1f1b")
    loss = summed(GOOD[:0], target=GOOD[:0])
    loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in summed.parameters())
    losses.append(loss.item())
    return losses


def test_fewer_rows_than_chunks_and_none_at_all(on_ranks: Any) -> None:
    losses = on_ranks(2, few_rows)
    assert losses[0] == losses[1]
