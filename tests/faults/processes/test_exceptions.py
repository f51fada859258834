"""An exception on one rank is raised there, and told to all others within two seconds, with its traceback."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Mesh, Pipe
from tests.faults.processes.training import (
    BOUND,
    PATIENCE,
    Failing,
    Outcome,
    assert_clean_exit,
    mean_square,
    model,
    note_error,
    note_strikes,
    train,
)


def check_exception(outcome: Outcome, failed: int, ranks: int, kind: str, text: str, where: str | None) -> None:
    assert outcome.raised.keys() == set(range(ranks)), [each.errors for each in outcome.ended]
    own = outcome.raised.pop(failed)
    assert (own.type, own.text) == (kind, text)
    if where is not None:
        assert f"pipework: {where}" in own.notes
    assert outcome.ended[failed].code == 70
    for rank, error in outcome.raised.items():
        assert error.type == "PipelineError"
        assert (error.rank, error.kind, error.where) == (failed, "error", where), error.text
        assert f"rank {failed} (stage" in error.text
        assert f"{kind}: {text}" in error.text
        assert "Traceback (most recent call last)" in (error.traceback_text or "")
        assert_clean_exit(outcome.ended[rank])
        assert outcome.ended[rank].code == 71
    assert outcome.seconds <= BOUND * PATIENCE


@pytest.mark.parametrize(
    "fault",
    [
        "rank=1,step=1,action=F,micro_batch=2",
        "rank=2,step=2,action=B,micro_batch=0",
        "rank=0,step=1,action=save",
        "rank=0,step=2,action=RECV_B,micro_batch=1",
    ],
)
def test_exception(failing: Failing, fault: str) -> None:
    rank, action = int(fault[5]), fault.split("action=")[1].split(",")[0]
    where = f"stage {rank}, micro-batch {fault[-1]}, action {action}" if "micro" in fault else None
    text = f"injected on purpose: {fault},kind=raise"
    check_exception(failing(3, f"{fault},kind=raise"), rank, 3, "InjectedFault", text, where)


def test_of_the_rank_that_has_the_store(failing: Failing) -> None:
    """It would end, and the store with it, before others have read what it says."""
    fault = "rank=0,step=1,action=B,micro_batch=1,kind=raise"
    outcome = failing(2, fault, own_store=True)
    where = "stage 0, micro-batch 1, action B"
    check_exception(outcome, 0, 2, "InjectedFault", f"injected on purpose: {fault}", where)


def fails_between_steps(mesh: Mesh, folder: str) -> None:
    """Outside of the pipe nobody can report an exception but the end of the program itself."""
    train(mesh, folder, steps=2)
    pipe = Pipe(model(), chunks=2, schedule="1f1b", loss_fn=mean_square, mesh=mesh)
    try:
        x = torch.randn(4, 8)
        for step in range(3):
            if mesh.rank == 1 and step == 2:
                Path(folder, "struck.1").write_text(str(time.time()))
                raise LookupError("no more data")
            pipe(x, target=x).backward()
    except BaseException as error:
        note_error(folder, mesh.rank, error)
        raise


def test_between_two_steps(failing: Failing) -> None:
    outcome = failing(2, "", body=fails_between_steps)
    assert outcome.raised[1].type == "LookupError"
    error = outcome.raised[0]
    assert (error.rank, error.kind) == (1, "left")
    assert "rank 1 (stage 1) left after 2 training steps with LookupError: no more data" in error.text
    assert "rank 0 (stage 0) is in its 3rd training step" in error.text
    assert [each.code for each in outcome.ended] == [71, 70]
    assert outcome.seconds <= BOUND * PATIENCE


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x.detach() == 0).all():
            raise ZeroDivisionError("all zero")
        return x


def lingers(mesh: Mesh, folder: str) -> None:
    note_strikes(folder, mesh.rank)
    pipe = Pipe(nn.Sequential(nn.Linear(8, 8), Odd()), chunks=2, loss_fn=mean_square, mesh=mesh, schedule="1f1b")
    x = torch.randn(4, 8)
    try:
        pipe(x, target=x).backward()
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.zero_()
        Path(folder, f"struck.{mesh.rank}").write_text(str(time.time()))
        pipe(x, target=x)
    except BaseException as error:
        note_error(folder, mesh.rank, error)
        if mesh.rank == 1:
            time.sleep(30)
        raise


def test_others_do_not_wait_for_a_rank_that_lingers(failing: Failing) -> None:
    outcome = failing(2, "", body=lingers, but=[1])
    assert outcome.raised[1].type == "ZeroDivisionError"
    error = outcome.raised[0]
    assert (error.rank, error.where) == (1, "stage 1, micro-batch 0, action F")
    assert "in layer '1' (Odd)" in (error.traceback_text or "")
    assert 'raise ZeroDivisionError("all zero")' in (error.traceback_text or "")
    assert "stage_run.py" not in (error.traceback_text or "")
    assert outcome.seconds <= BOUND * PATIENCE
    assert outcome.ended[0].code == 71


def bad_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target[0, 0] == 7:
        raise ArithmeticError("seven")
    return mean_square(output, target)


def trains_with_bad_loss(mesh: Mesh, folder: str) -> dict[str, Any]:
    pipe = Pipe(model(), chunks=2, loss_fn=bad_loss, mesh=mesh, schedule="1f1b")
    x = torch.randn(4, 8)
    try:
        pipe(x, target=x).backward()
        Path(folder, f"struck.{mesh.rank}").write_text(str(time.time()))
        pipe(x, target=torch.full_like(x, 7))
    except BaseException as error:
        note_error(folder, mesh.rank, error)
        raise
    return {}


def test_in_the_loss(failing: Failing) -> None:
    outcome = failing(2, "", body=trains_with_bad_loss)
    check_exception(outcome, 1, 2, "ArithmeticError", "seven", "stage 1, micro-batch 0, action F")
    assert all("stage_run.py" not in each.errors for each in outcome.ended)
    assert "in bad_loss" in outcome.ended[1].errors
