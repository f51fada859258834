"""examples/transformer_ddp.py: two processes train as one would, and it is seen if they do not."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed")

SCRIPT = Path(__file__).parents[2] / "examples" / "transformer_ddp.py"
SIZES = ["--width", "8", "--layers", "2", "--context", "16", "--vocabulary", "100", "--batch-size", "8"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

SABOTAGED = """
import sys
sys.path.insert(0, {folder!r})
import transformer_ddp
transformer_ddp.DistributedDataParallel = lambda pipe: pipe  # nobody averages the gradients
sys.exit(transformer_ddp.main())
"""


@pytest.fixture(scope="module")
def tiny() -> list[str]:
    return [*SIZES, "--chunks", "2", "--epochs", "2", "--steps", "4", "--data", argparse.__file__]


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process with a group of its own, as a terminal gives it; nothing of it is left."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def figures(told: str) -> list[float]:
    return [float(figure) for figure in re.findall(r"(?:loss|perplexity) ([\d.]+)", told)]


@pytest.mark.thorough
def test_torchrun_trains_as_one_process_would(
    load: Callable[[str], ModuleType],
    environment: dict[str, str],
    tiny: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running([*TORCHRUN, str(SCRIPT), *tiny, "--dropout", "0"], environment) as process:
        out, told = process.communicate(timeout=100)
    assert process.returncode == 0, told
    assert "parameters of all 2 processes: equal, to the last bit" in out
    assert "2 processes, each with 4 of 8 rows" in out

    # Alone it tests the best model and names a baseline; here the second epoch's is the best.
    assert load("transformer").main([*tiny, "--dropout", "0"]) == 0
    alone = capsys.readouterr().out
    assert alone.count("best so far") == 2
    assert len(figures(out)) >= 7
    assert figures(out) == pytest.approx(figures(alone), rel=0.003)  # printed to three digits


@pytest.mark.thorough
def test_processes_that_differ_are_seen(environment: dict[str, str], tiny: list[str], tmp_path: Path) -> None:
    sabotaged = tmp_path / "sabotaged.py"
    sabotaged.write_text(SABOTAGED.format(folder=str(SCRIPT.parent)))
    with running([*TORCHRUN, str(sabotaged), *tiny, "--epochs", "1"], environment) as process:
        out, _ = process.communicate(timeout=100)
    assert "parameters of all 2 processes: DIFFERENT" in out
    assert process.returncode == 1


@pytest.mark.thorough
def test_ctrl_c_ends_both_after_the_same_step(environment: dict[str, str], tiny: list[str]) -> None:
    endless = [*tiny, "--epochs", "10000", "--steps", "10000"]
    with running([sys.executable, str(SCRIPT), *endless], environment) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("epoch 1/10000  step") for line in lines)
        os.killpg(process.pid, signal.SIGINT)
        out, complaint = process.communicate(timeout=60)
    assert (process.returncode, complaint) == (130, "")
    assert "stopped early" in out
    assert "parameters of all 2 processes: equal, to the last bit" in out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--batch-size", "5"], "--batch-size is 5: it must be a multiple of 2, the number of processes"),
        (["--data", "missing.txt"], "missing.txt: No such file or directory"),
    ],
)
def test_a_mistake_costs_one_line_before_any_process_starts(
    load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    load("transformer")
    with pytest.raises(SystemExit) as stopped:
        load("transformer_ddp").main(options)
    out, complaint = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert complaint.count("\n") == 1
    assert told in complaint
