"""examples/old: scripts that import what is no longer there run unchanged, and learn."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.programs import RunPython

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed")

OLD = Path(__file__).parents[2] / "examples" / "old"
TINY = ["--width", "8", "--context", "16", "--words", "100", "--batch-size", "8", "--steps", "12"]


@pytest.fixture
def run(run_python: RunPython, environment: dict[str, str]) -> Callable[..., str]:
    """What a script prints. It must not warn; PyTorch may, of its own RPC."""
    warnings = "error,ignore:You are using a Backend:UserWarning"

    def run(name: str, *options: str) -> str:
        command = ["-m", "pipework.compat", OLD / name, *options]
        ended = run_python(command, env={**environment, "PYTHONWARNINGS": warnings})
        assert (ended.returncode, ended.stderr) == (0, "")
        return ended.stdout

    return run


def perplexities(told: str) -> list[float]:
    return [float(found) for found in re.findall(r"perplexity ([\d.]+)", told)]


@pytest.mark.thorough
def test_a_transformer_of_2021_learns(run: Callable[..., str]) -> None:
    told = run("transformer_sync.py", *TINY, "--layers", "2")
    assert "4 layers in 2 partitions on" in told
    first, second, test = perplexities(told)
    assert second < first < 100  # which is what equally likely words have
    assert test < 100


@pytest.mark.thorough
def test_two_replicas_of_2021_learn_the_same(run: Callable[..., str]) -> None:
    told = run("transformer_ddp_sync.py", *TINY)
    first, second, test = perplexities(told)
    assert second < first < 100
    assert test < 100
    assert "parameters of both processes: equal, to the last bit" in told


@pytest.mark.thorough
def test_a_resnet_of_2019_learns(run: Callable[..., str]) -> None:
    sizes = ["--width", "4", "--size", "12", "--batch-size", "32", "--steps", "60"]
    told = run("resnet_skips.py", *sizes)
    assert "30 layers, of which" in told
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", told)]
    assert losses[-1] < losses[0]
    assert float(re.findall(r"after: +([\d.]+)%", told)[0]) > 50  # of three shapes


@pytest.mark.parametrize("script", sorted(OLD.glob("*.py")), ids=lambda script: script.name)
def test_none_of_them_knows_pipework(script: Path) -> None:
    code = script.read_text()
    assert f"    python -m pipework.compat examples/old/{script.name} " in code
    assert not re.search(r"^\s*(import|from) pipework", code, re.MULTILINE)
    assert script.name in (OLD / "README.md").read_text()
