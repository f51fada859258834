"""examples/two_layers.py: it runs as a user runs it, and its comparison with the plain module can fail."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.programs import RunPython

SCRIPT = Path(__file__).parents[2] / "examples" / "two_layers.py"


def test_a_user_sees_shape_loss_and_equality_without_any_warning(
    run_python: RunPython, environment: dict[str, str]
) -> None:
    ended = run_python([SCRIPT], env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "2 layers in 2 partitions" in ended.stdout
    assert "output    (16, 4) on" in ended.stdout
    assert "names     0.weight, 0.bias, 1.weight, 1.bias" in ended.stdout
    assert ended.stdout.count("equal, to the last bit") == 2


@pytest.mark.parametrize("chunks", ["1", "3", "16", "40"])
def test_it_is_equal_for_any_number_of_chunks(
    script: ModuleType, capsys: pytest.CaptureFixture[str], chunks: str
) -> None:
    assert script.main(["--chunks", chunks, "--seed", "1"]) == 0
    assert "DIFFERENT" not in capsys.readouterr().out


def test_a_difference_is_seen(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backward = script.reference_backward

    def slightly_off(model: torch.nn.Module, *arguments: object, **keyword_arguments: object) -> object:
        reference = backward(model, *arguments, **keyword_arguments)
        last = model[1].bias.grad
        last[3] = torch.nextafter(last[3], torch.tensor(torch.inf))
        return reference

    monkeypatch.setattr(script, "reference_backward", slightly_off)
    assert script.main([]) == 1
    out = capsys.readouterr().out
    assert "loss      equal, to the last bit\ngradients DIFFERENT" in out
