"""Ranks that were started with different settings are refused before any work, with what differs."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipework
from pipework import Mesh, Pipe
from tests.faults.processes.training import PATIENCE, Failing, mean_square, note_error

BOUND = 5.0
DIFFERENCES: dict[str, str] = {
    "schedule": 'schedule: "1f1b" on rank 0; "gpipe" on rank 1',
    "chunks": "chunks: 4 on rank 0; 8 on rank 1",
    "model": 'first difference at 2.bias: "torch.float32 (8,)" on rank 0; "torch.float32 (9,)" on rank 1',
    "layer": 'layers, first difference at 1: "1: Tanh" on rank 0; "1: ReLU" on rank 1',
    "version": 'pipework: "{version}" on rank 0; "0.0.1" on rank 1',
    "torch": 'torch: "{torch}" on rank 0; "1.0" on rank 1',
    "checkpoint": 'checkpoint: "except_last" on rank 0; "always" on rank 1',
}


def disagree(mesh: Mesh, folder: str, about: str) -> None:
    odd = about if mesh.rank == 1 else ""
    if odd == "version":
        pipework.__version__ = "0.0.1"
    if odd == "torch":
        torch.__version__ = "1.0"
    options: dict[str, Any] = {"schedule": "gpipe" if odd == "schedule" else "1f1b"}
    options["chunks"] = 8 if odd == "chunks" else 4
    options["checkpoint"] = "always" if odd == "checkpoint" else "except_last"
    width = 9 if odd == "model" else 8
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU() if odd == "layer" else nn.Tanh(), nn.Linear(8, width))
    Path(folder, f"struck.{mesh.rank}").write_text(str(time.time()))
    try:
        Pipe(module, loss_fn=mean_square, mesh=mesh, balance=[1, 2], **options)
    except ValueError as error:
        note_error(folder, mesh.rank, error)
        raise


@pytest.mark.parametrize(
    "about",
    ["chunks", *(pytest.param(each, marks=pytest.mark.slow) for each in sorted({*DIFFERENCES} - {"chunks"}))],
)
def test_different_settings_are_refused(failing: Failing, about: str) -> None:
    outcome = failing(2, "", body=disagree, about=about)
    shown = DIFFERENCES[about].format(version=pipework.__version__, torch=torch.__version__)
    assert outcome.raised.keys() == {0, 1}, [each.errors for each in outcome.ended]
    for error in outcome.raised.values():
        assert error.type == "ValueError"
        assert "the ranks were started with different settings" in error.text
        assert shown in error.text
    assert outcome.seconds <= BOUND * PATIENCE
    assert [each.code for each in outcome.ended] == [70, 70]
