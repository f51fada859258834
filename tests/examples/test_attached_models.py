"""The short examples of `attach`: adapters of a causal model, a denoiser, and a model of vision and language learn."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["lora", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("denoiser", "vision_language"))]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("name", NAMES)
def test_it_learns_and_is_short(
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    if name == "denoiser":
        pytest.importorskip("diffusers")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load(name).main([])
    losses = [float(number) for number in re.findall(r"step \d+  loss (\d\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
