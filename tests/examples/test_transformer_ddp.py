"""examples/transformer_ddp.py: two processes train as one would."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.programs import RunPython

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed")

SCRIPT = Path(__file__).parents[2] / "examples" / "transformer_ddp.py"
SIZES = ["--width", "8", "--layers", "2", "--context", "16", "--vocabulary", "100", "--batch-size", "8"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def tiny() -> list[str]:
    return [*SIZES, "--chunks", "2", "--epochs", "2", "--steps", "4", "--data", argparse.__file__]


def figures(told: str) -> list[float]:
    return [float(figure) for figure in re.findall(r"(?:loss|perplexity) ([\d.]+)", told)]


@pytest.mark.thorough
def test_torchrun_trains_as_one_process_would(
    load: Callable[[str], ModuleType],
    environment: dict[str, str],
    run_python: RunPython,
    tiny: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [*TORCHRUN, SCRIPT, *tiny, "--dropout", "0"]
    ended = run_python(command, env={**environment, "PYTHONWARNINGS": "default"})
    assert ended.returncode == 0, ended.stderr
    out = ended.stdout
    assert "parameters of all 2 processes: equal, to the last bit" in out
    assert "2 processes, each with 4 of 8 rows" in out

    # Alone it tests the best model and names a baseline; here the second epoch's is the best.
    assert load("transformer").main([*tiny, "--dropout", "0"]) == 0
    alone = capsys.readouterr().out
    assert alone.count("best so far") == 2
    assert len(figures(out)) >= 7
    assert figures(out) == pytest.approx(figures(alone), rel=0.003)  # printed to three digits
