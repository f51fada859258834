"""examples/finetune.py: a model of transformers learns in a pipe, with and without adapters, and writes afterwards."""

import re
from types import ModuleType

import pytest


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("options", [[], ["--lora", "--schedule", "gpipe"]], ids=["whole", "adapters"])
def test_it_learns(script: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    script.main(["--steps", "4", "--rows", "8", "--chunks", "4", *options])
    shown = capsys.readouterr().out
    losses = [float(number) for number in re.findall(r"loss (\d\.\d+)", shown)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert shown.splitlines()[-1].startswith("'def ")
