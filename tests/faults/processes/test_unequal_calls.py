"""Ranks that do not make the same calls are told so, with what each has called."""

import time
from pathlib import Path

import pytest
import torch

from pipework import Mesh, Pipe, save_checkpoint
from tests.faults.processes.training import DETECT, PATIENCE, Failing, mean_square, model, note_error


def calls(mesh: Mesh, folder: str, odd: int, does: str) -> None:
    pipe = Pipe(model(), chunks=2, loss_fn=mean_square, mesh=mesh, schedule="1f1b")
    x = torch.randn(4, 8)
    try:
        for step in range(3):
            if mesh.rank == odd and step == 2:
                Path(folder, f"struck.{odd}").write_text(str(time.time()))
                if does == "leave":
                    return
                if does == "save":
                    save_checkpoint(folder, pipe, step=1)
                if does == "evaluate":
                    with torch.no_grad():
                        pipe(x, target=x)
            pipe(x, target=x).backward()
    except BaseException as error:
        note_error(folder, mesh.rank, error)
        raise


@pytest.mark.parametrize(("odd", "own_store"), [(1, False), (0, True)])
def test_a_rank_has_fewer_data(failing: Failing, odd: int, own_store: bool) -> None:
    outcome = failing(2, "", body=calls, odd=odd, does="leave", own_store=own_store)
    other = 1 - odd
    assert outcome.ended[odd].code == 0
    error = outcome.raised[other]
    assert (error.type, error.rank, error.kind) == ("PipelineError", odd, "left"), error.text
    assert f"rank {odd} (stage {odd}) left after 2 training steps" in error.text
    assert f"rank {other} (stage {other}) is in its 3rd training step" in error.text
    assert "give all ranks of a pipe the same batches: a DataLoader with sampler=pipe.sampler(dataset)" in error.text
    assert outcome.seconds <= DETECT * PATIENCE
    assert outcome.ended[other].code == 71


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_saves_while_others_train(failing: Failing, odd: int) -> None:
    outcome = failing(2, "", body=calls, odd=odd, does="save")
    texts = [error.text for error in outcome.raised.values()]
    assert len(texts) == 2
    for error in outcome.raised.values():
        assert (error.type, error.kind) == ("PipelineError", "disagreement"), error.text
        assert "call 3 is " in error.text
        assert "'checkpoint'" in error.text
        assert "'training step'" in error.text
    assert outcome.seconds <= DETECT * PATIENCE


def test_a_rank_evaluates_while_others_train(failing: Failing) -> None:
    outcome = failing(2, "", body=calls, odd=1, does="evaluate")
    assert len(outcome.raised) == 2
    kinds = {error.type for error in outcome.raised.values()}
    assert kinds <= {"ValueError", "PipelineError"}
    for error in outcome.raised.values():
        assert "grad is" in error.text or "'evaluation'" in error.text, error.text
    assert outcome.seconds <= DETECT * PATIENCE
