"""examples/skip_connections.py: it runs as a user runs it, says what is wrong, and its comparison can fail."""

import threading
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor, nn

from tests.programs import RunPython

SCRIPT = Path(__file__).parents[2] / "examples" / "skip_connections.py"


def test_a_user_sees_equality_and_what_is_said_about_mistakes(
    run_python: RunPython, environment: dict[str, str]
) -> None:
    ended = run_python([SCRIPT], env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("output and gradients equal, to the last bit") == 2
    assert [line.strip() for line in ended.stdout.splitlines() if line.startswith("    *")] == [
        "* no module declared '1to3' as poppable but stashed",
        "* '1' declared '1to3' as poppable but it was not stashed",
        "* '0' declared '1to3' as poppable but it was not stashed",
        "* no module declared '1to3' as poppable but stashed",
        "* '1' redeclared '1to3' as stashable but not isolated by namespace",
    ]
    assert "Layer1 Layer3 Layer3\n    nothing to complain about" in ended.stdout


def test_a_difference_is_seen(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Doubled(nn.Module):
        """Does something else on a worker's thread."""

        def forward(self, x: Tensor) -> Tensor:
            return x * (2 if threading.current_thread() is threading.main_thread() else 3)

    assert not script.compare(nn.Sequential(script.Layer2(), Doubled()))
    assert "DIFFERENT" in capsys.readouterr().out
    monkeypatch.setattr(script, "compare", lambda model: False)
    assert script.main([]) == 1


def test_a_complaint_that_does_not_come_is_seen(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "verify_skippables", lambda model: None)
    assert script.main([]) == 1
