"""examples/transformer.py: it learns with and without a pipeline alike, and keeps the best model."""

import argparse
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from tests.programs import RunPython

SCRIPT = Path(__file__).parents[2] / "examples" / "transformer.py"
TINY = ["--width", "8", "--layers", "2", "--context", "16", "--vocabulary", "100", "--batch-size", "8", "--chunks", "4"]


@pytest.fixture(scope="module")
def script(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("transformer")


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


def test_batches_are_rows_of_text_and_the_words_that_follow(script: ModuleType) -> None:
    text = script.batchify(torch.arange(11), 2)
    assert text.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    x, y = script.get_batch(text, 0, 3)
    assert (x.tolist(), y.tolist()) == ([[0, 1, 2], [5, 6, 7]], [[1, 2, 3], [6, 7, 8]])
    x, y = script.get_batch(text, 3, 3)
    assert (x.tolist(), y.tolist()) == ([[3], [8]], [[4], [9]])


def test_evaluation_is_the_mean_of_all_words(script: ModuleType) -> None:
    class Sure(nn.Module):
        """Is sure that the number of the next word is that of this word."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3) * 100.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight[x]

    text = torch.tensor([[0, 0, 0, 0, 0, 1]])  # right four times, and wrong the last time, by 100
    for context in (1, 2, 4, 5, 9):
        assert script.evaluate(Sure(), text, context) == pytest.approx(100 / 5)


def test_what_is_held_out_is_not_trained_on(script: ModuleType) -> None:
    options = script.options_of_training("").parse_args([])
    paragraphs = script.read_paragraphs(None)
    assert len(set(paragraphs)) == len(paragraphs) > 1000
    corpus = script.read_corpus(options)
    assert len(corpus.words) == options.vocabulary
    assert len(corpus.train) > 50_000
    assert len(corpus.valid) > 5_000
    assert len(corpus.test) > 5_000
    assert sum(paragraph.count("\n") for paragraph in paragraphs) > 1000
    unknown = (corpus.train == 0).float().mean()
    assert 0 < unknown < 0.05


def test_ctrl_c_tests_the_best_model_so_far(
    script: ModuleType, tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = script.train

    def interrupted(*arguments: object) -> Iterator[float]:
        for step, loss in enumerate(train(*arguments), 1):
            if step == 3:
                signal.raise_signal(signal.SIGINT)
            yield loss

    monkeypatch.setattr(script, "train", interrupted)
    assert script.main([*tiny, "--epochs", "9"]) == 130
    out = capsys.readouterr().out
    assert "stopped early" in out
    assert "epoch 2/9" not in out
    assert "test perplexity" in out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--epochs", "0"], "--epochs: 0 is no whole number above 0"),
        (["--steps", "many"], "--steps: many is no whole number above 0"),
        (["--dropout", "1"], "--dropout: 1 is no number from 0 to below 1"),
        (["--width", "10"], "--width is 10: it must be a multiple of 4"),
        (["--layers", "2", "--stages", "5"], "--stages is 5: there are only 4 layers"),
        (["--data", "{folder}/missing.txt"], "missing.txt: No such file or directory"),
        (["--data", "{folder}/short.txt"], "the text has 0 words for --batch-size 16"),
        (["--timeline", "step.png"], "step.png must end in .svg"),
        (["--save", "{folder}/none/best.pt"], "there is no folder"),
        (["--plain", "--timeline", "step.svg"], "--timeline shows the workers of a pipeline, and --plain has none"),
        (["--checkpoint", "sometimes"], "sometimes"),
    ],
)
def test_a_mistake_costs_one_line_and_status_2(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    (tmp_path / "short.txt").touch()
    with pytest.raises(SystemExit) as stopped:
        script.main([option.format(folder=tmp_path) for option in options])
    out, complaint = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert complaint.count("\n") == 1
    assert told in complaint


def test_a_training_that_diverges_says_so(
    script: ModuleType, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main([*tiny, "--rate", "1e4"])
    assert stopped.value.code == 2
    assert "choose a --rate below 10000.0" in capsys.readouterr().err
