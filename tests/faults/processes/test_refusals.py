"""Rows 10 to 12 of the fault matrix: what ranks give or call that does not fit is refused, on all of them."""

import time
from typing import Any

import pytest
import torch
from torch import nn

import pipework
from pipework import Mesh, MicroBatches, Pipe, PipelineError, save_checkpoint
from tests.distributed.together.alike import refused
from tests.faults.processes.training import (
    BOUND,
    DETECT,
    PATIENCE,
    Failing,
    mean_square,
    model,
    note_strike,
    noting,
    small_pipe,
)
from tests.jobs import runs_on

# ---- bad input -------------------------------------------------------------------------------------------------------

GOOD = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))  # the same on all ranks
# Which rank raises its own error, the inputs, the target, and the error.
BAD: dict[str, tuple[int, tuple[Any, ...], Any, type[Exception], str]] = {
    "no tensor": (0, ("text",), GOOD, TypeError, "do not have any tensors"),
    "nothing": (0, (None,), GOOD, TypeError, "do not have any tensors"),
    "a number": (0, (torch.tensor(3.0),), GOOD, ValueError, "dimension"),
    "other rows": (
        1,
        (GOOD,),
        GOOD[:3],
        ValueError,
        "the inputs have 4 rows and a target tensor has shape (3, 8): wanted as many rows, on all ranks of a pipe the "
        "same",
    ),
    "other micro-batches": (
        1,
        (MicroBatches([GOOD] * 3),),
        MicroBatches([GOOD] * 2),
        ValueError,
        "have 3 micro-batches and the target has 2",
    ),
    "a target to split": (1, (MicroBatches([GOOD]),), GOOD, ValueError, "the target has tensors outside of MicroB"),
    "a target that is split": (1, (GOOD,), MicroBatches([GOOD]), TypeError, "MicroBatches and the inputs are not"),
    "differentiable target": (1, (GOOD,), GOOD.clone().requires_grad_(), ValueError, "requires a gradient"),
    "other width": (0, (torch.randn(4, 7),), GOOD, RuntimeError, "cannot be multiplied"),
    "meta": (0, (GOOD.to("meta"),), GOOD, NotImplementedError, "meta"),
}


@pytest.mark.parametrize("what", BAD)
@runs_on(2)
def test_bad_input(mesh: Mesh, what: str) -> None:
    at, inputs, target, kind, words = BAD[what]
    pipe = small_pipe(mesh)
    pipe(GOOD, target=GOOD).backward()
    begin = time.monotonic()
    with pytest.raises(kind if mesh.rank == at else PipelineError) as caught:
        # A rank is given what is its own alone.
        pipe(*(inputs if pipe.is_first else (None,)), target=target if pipe.is_last else None)
    assert words in str(caught.value)
    if isinstance(caught.value, PipelineError):
        assert (caught.value.rank, caught.value.kind) == (at, "error")
    assert time.monotonic() - begin <= BOUND * PATIENCE


def sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


@runs_on(2)
def test_fewer_rows_than_chunks_and_none_at_all(mesh: Mesh) -> list[float]:
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
    return [*losses, loss.item()]


# ---- other settings --------------------------------------------------------------------------------------------------

DIFFERENCES: dict[str, str] = {
    "schedule": 'schedule: "1f1b" on rank 0; "gpipe" on rank 1',
    "chunks": "chunks: 4 on rank 0; 8 on rank 1",
    "model": 'first difference at 2.bias: "torch.float32 (8,)" on rank 0; "torch.float32 (9,)" on rank 1',
    "layer": 'layers, first difference at 1: "1: Tanh" on rank 0; "1: ReLU" on rank 1',
    "version": f'pipework: "{pipework.__version__}" on rank 0; "0.0.1" on rank 1',
    "torch": f'torch: "{torch.__version__}" on rank 0; "1.0" on rank 1',
    "loss": "loss_fn, first difference at 1.label_smoothing: 0.0 on rank 0; 0.1 on rank 1",
    "checkpoint": 'checkpoint: "except_last" on rank 0; "always" on rank 1',
}


@pytest.mark.parametrize("about", DIFFERENCES)
@runs_on(2)
def test_different_settings(mesh: Mesh, about: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = about if mesh.rank == 1 else ""
    if odd == "version":
        monkeypatch.setattr(pipework, "__version__", "0.0.1")
    if odd == "torch":
        monkeypatch.setattr(torch, "__version__", "1.0")
    options: dict[str, Any] = {"schedule": "gpipe" if odd == "schedule" else "1f1b"}
    options["chunks"] = 8 if odd == "chunks" else 4
    options["checkpoint"] = "always" if odd == "checkpoint" else "except_last"
    width = 9 if odd == "model" else 8
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU() if odd == "layer" else nn.Tanh(), nn.Linear(8, width))
    loss = nn.CrossEntropyLoss(label_smoothing=0.1 if odd == "loss" else 0.0)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="the ranks were started with different settings") as caught:
        Pipe(module, loss_fn=loss, mesh=mesh, balance=[1, 2], **options)
    assert DIFFERENCES[about] in str(caught.value)
    assert time.monotonic() - begin <= 5.0 * PATIENCE


# ---- other calls -----------------------------------------------------------------------------------------------------


def leaves(mesh: Mesh, folder: str, odd: int) -> None:
    pipe, x = small_pipe(mesh), torch.randn(4, 8)
    with noting(folder, mesh.rank):
        for step in range(3):
            if mesh.rank == odd and step == 2:
                note_strike(folder, odd)
                return
            pipe(x, target=x).backward()


@pytest.mark.parametrize(("odd", "own_store"), [(1, False), (0, True)])
def test_a_rank_has_fewer_data(failing: Failing, odd: int, own_store: bool) -> None:
    outcome = failing(2, "", body=leaves, odd=odd, own_store=own_store)
    other = 1 - odd
    assert (outcome.ended[odd].code, outcome.ended[other].code) == (0, 71)
    error = outcome.raised[other]
    assert (error.type, error.rank, error.kind) == ("PipelineError", odd, "left"), error.text
    assert f"rank {odd} (stage {odd}) left after call 2 (training step)" in error.text
    assert f"rank {other} (stage {other}) is in call 3 (training step)" in error.text
    assert "give all ranks of a pipe the same batches: a DataLoader with sampler=pipe.sampler(dataset)" in error.text
    assert outcome.seconds <= DETECT * PATIENCE


@pytest.mark.parametrize(("odd", "does"), [(0, "saves"), (1, "saves"), (1, "evaluates")])
@runs_on(2)
def test_a_rank_saves_or_evaluates_while_the_other_trains(mesh: Mesh, odd: int, does: str, folder: str) -> None:
    pipe, x = small_pipe(mesh), torch.randn(4, 8)
    for _ in range(2):
        pipe(x, target=x).backward()
    begin = time.monotonic()
    with refused(None, *([PipelineError] if does == "saves" else [])) as caught:
        if mesh.rank == odd and does == "saves":
            save_checkpoint(folder, pipe, step=1)
        with torch.set_grad_enabled(mesh.rank != odd):
            pipe(x, target=x)
    text = str(caught.value)
    if does == "saves":
        assert caught.value.kind == "disagreement"  # type: ignore[union-attr]
        assert all(words in text for words in ("call 3 is ", "'checkpoint'", "'training step'")), text
    else:
        assert "grad is" in text or "'evaluation'" in text, text
    assert time.monotonic() - begin <= DETECT * PATIENCE
