"""examples/transformer.py: it learns with and without a pipeline alike, and keeps the best model."""

import argparse
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from tests.programs import RunPython

SCRIPT = Path(__file__).parents[2] / "examples" / "transformer.py"
TINY = ["--width", "8", "--layers", "2", "--context", "16", "--vocabulary", "100", "--batch-size", "8", "--chunks", "4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_bytes(Path(argparse.__file__).read_bytes())
    return [*TINY, "--epochs", "2", "--steps", "8", "--data", str(text)]


def figures(told: str) -> list[float]:
    """All that was said about losses, without the speed."""
    return [float(figure) for figure in re.findall(r"(?:loss|perplexity) ([\d.]+)", told)]


def test_a_user_sees_it_learn_without_any_warning(
    run_python: RunPython, environment: dict[str, str], script: ModuleType, tiny: list[str], tmp_path: Path
) -> None:
    picture, file = tmp_path / "step.svg", tmp_path / "best.pt"
    ended = run_python([SCRIPT, *tiny, "--timeline", picture, "--save", file], env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    first, second = (float(found) for found in re.findall(r"validation loss \S+  perplexity (\S+)", ended.stdout))
    assert second < first < 100  # which is what equally likely words have
    assert "\x1b" not in ended.stdout
    titles = list(ElementTree.parse(picture).getroot().itertext())
    assert sum(title.startswith(("predicted", "measured")) for title in titles) == 2

    # The model that was saved is the one that was tested.
    options = script.options_of_training("").parse_args(tiny)
    corpus = script.read_corpus(options)
    model = script.language_model(options, len(corpus.words))
    model.load_state_dict(torch.load(file, weights_only=True))
    loss = script.evaluate(model, script.batchify(corpus.test, options.batch_size), options.context)
    assert f"test perplexity {script.perplexity(loss):.1f};" in ended.stdout


@pytest.mark.parametrize("option", [["--plain"], ["--checkpoint", "always"], ["--stages", "3", "--chunks", "1"]])
def test_the_loop_gives_the_same_with_and_without_a_pipeline(
    script: ModuleType, tiny: list[str], capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    assert script.main([*tiny, "--dropout", "0"]) == 0
    expected = figures(capsys.readouterr().out)
    assert len(expected) >= 9
    assert script.main([*tiny, "--dropout", "0", *option]) == 0
    assert figures(capsys.readouterr().out) == pytest.approx(expected, rel=0.003)  # printed to three digits
    assert script.main([*tiny, "--dropout", "0.5", *option]) == 0
    assert figures(capsys.readouterr().out) != pytest.approx(expected, rel=0.003)


def test_the_best_model_is_kept_not_the_last(
    script: ModuleType, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(epochs: str, losses: list[float]) -> dict[str, torch.Tensor]:
        told = iter([*losses, 1.0])  # the last is that of the test
        monkeypatch.setattr(script, "evaluate", lambda *_: next(told))
        assert script.main([*tiny, "--epochs", epochs, "--save", str(tmp_path / "best.pt")]) == 0
        state: dict[str, torch.Tensor] = torch.load(tmp_path / "best.pt", weights_only=True)
        return state

    best, of_three = save("2", [3.0, 2.0]), save("3", [3.0, 2.0, 2.5])
    last = save("3", [3.0, 2.0, 1.5])
    assert all(torch.equal(of_three[name], value) for name, value in best.items())
    assert not torch.equal(last["0.word.weight"], best["0.word.weight"])


@pytest.mark.parametrize("training", [True, False])
def test_no_word_sees_a_later_one(script: ModuleType, training: bool) -> None:
    layer = script.CausalLayer(8, script.HEADS, 16, 0.0, batch_first=True).train(training)
    x = torch.randn(2, 6, 8)
    changed = x.clone()
    changed[:, 4:] += 1.0
    with torch.no_grad():  # in evaluation PyTorch then takes another way
        before, after = layer(x), layer(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert (after[:, 4:] - before[:, 4:]).abs().amin(2).gt(0).all()
