"""examples/train_gpt.py: what a run leaves, that it can be stopped and resumed, and that mistakes cost one line.

In two processes it gives the same bits as in one.
"""

import argparse
import json
import signal
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipework.saving import convert
from tests.programs import RunPython

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
FILES = {"metrics.jsonl", "options.json", "checkpoints", "timeline.svg", "trace.json"}
STEPS = 24
TINY = ["--width", "16", "--layers", "2", "--batch-size", "16", "--stages", "2", "--chunks", "4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_bytes(Path(argparse.__file__).read_bytes())
    return [*TINY, "--steps", str(STEPS), "--data", str(text)]


@pytest.fixture(scope="module")
def run(script: ModuleType, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert script.main([*tiny, "--out", str(folder)]) == 0
    return folder


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def weights(folder: Path, step: int, place: Path) -> dict[str, Tensor]:
    """The model of a checkpoint, under the plain model's names."""
    convert(folder / "checkpoints" / f"step-{step:08}", place / "model.safetensors", force=True)
    return load_file(place / "model.safetensors")


def stop_after(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, steps: int, number: signal.Signals = signal.SIGINT
) -> None:
    """Ctrl-C comes while this step, counted from the start of the process, is running."""
    train_step, count = script.train_step, iter(range(1, 10**6))

    def interrupted_step(*arguments: object) -> float:
        if next(count) == steps:
            signal.raise_signal(number)
        return train_step(*arguments)

    monkeypatch.setattr(script, "train_step", interrupted_step)


def test_a_run_leaves_metrics_a_checkpoint_a_picture_and_a_trace(run: Path) -> None:
    assert {path.name for path in run.iterdir()} == FILES
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{STEPS:08}"]
    picture = ElementTree.parse(run / "timeline.svg").getroot()
    titles = [text for text in picture.itertext() if text.startswith(("predicted", "measured"))]
    assert [title.partition(":")[0] for title in titles] == ["predicted", "measured"]
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}


def test_the_loss_falls(run: Path) -> None:
    curve = losses(run)
    assert len(curve) == STEPS
    assert all(later < earlier for earlier, later in zip(curve[:-4], curve[4:], strict=True))


@pytest.mark.thorough
def test_the_report_tells_what_was_promised(
    script: ModuleType, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([*tiny, "--steps", "3", "--out", str(tmp_path / "run"), "--compare"]) == 0
    told = capsys.readouterr().out
    words = ["schedule 1f1b, 4 chunks", "partition", "held-out loss", "bigram", "sample", "tokens/s", "bubble"]
    for word in [*words, "measured", "predicted", "MiB", "speed-up"]:
        assert word in told
    assert "\x1b" not in told
    assert "\r" not in told
    for name in (str(tmp_path / "run"), *FILES):
        assert name in told


@pytest.mark.thorough
def test_resuming_with_other_stages_and_another_schedule_goes_on_as_if_nothing_had_happened(
    script: ModuleType,
    tiny: list[str],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_after(script, patch, steps=9, number=signal.SIGTERM)
        assert script.main([*tiny, "--out", str(folder)]) == 130
    assert losses(folder) == losses(run)[:9]
    # As if the process had been killed later, in the middle of a line.
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 10, "loss": 0.0}\n{"step": 11, "lo')
    torch.manual_seed(1234)
    other = ["--stages", "4", "--schedule", "interleaved-1f1b"]
    assert script.main(["--resume", str(folder), *other]) == 0
    assert losses(folder) == losses(run)
    first, second = (weights(each, STEPS, tmp_path) for each in (run, folder))
    assert all(torch.equal(first[name], value) for name, value in second.items())
    told = capsys.readouterr().out
    assert "in 4 partitions" in told
    assert "schedule interleaved-1f1b" in told
    assert script.main(["--resume", str(folder), "--steps", str(STEPS + 3)]) == 0  # a finished run
    assert len(losses(folder)) == STEPS + 3


def test_the_checkpoint_loads_into_the_plain_model(script: ModuleType, run: Path, tmp_path: Path) -> None:
    options = json.loads((run / "options.json").read_text())
    model: nn.Module = script.gpt(options["width"], options["layers"])
    model.load_state_dict(weights(run, STEPS, tmp_path))


def test_a_run_is_neither_overwritten_nor_resumed_as_another(
    script: ModuleType, tiny: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def complaint(*options: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            script.main(list(options))
        assert stopped.value.code == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        return told

    before = losses(run)
    assert "File exists" in complaint(*tiny, "--out", str(run))
    assert f"has finished {STEPS} steps" in complaint("--resume", str(run))
    assert "--width is 16" in complaint("--resume", str(run), "--steps", "99", "--width", "32")
    assert losses(run) == before


def test_the_bigram_baseline_counts_pairs(script: ModuleType) -> None:
    text = torch.tensor([0, 1] * 128, dtype=torch.uint8)  # after 0 always 1: 128 times, after 1 always 0: 127 times
    x, y = torch.tensor([[0, 1, 0]]), torch.tensor([[1, 0, 0]])
    probabilities = torch.tensor([129 / 384, 128 / 383, 1 / 384])
    assert script.bigram_loss(text, x, y) == pytest.approx(-probabilities.log().mean().item(), rel=1e-5)


@pytest.mark.thorough
def test_a_run_of_one_process_goes_on_in_two(
    script: ModuleType,
    tiny: list[str],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_ranks: RunPython,
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(script, patch, steps=5)
        assert script.main([*tiny, "--out", str(folder)]) == 130
    ended = run_ranks(2, [SCRIPT, "--resume", folder])
    assert ended.returncode == 0, ended.stderr
    assert losses(folder) == losses(run)
    first, second = (weights(each, STEPS, tmp_path) for each in (run, folder))
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert {path.name for path in folder.iterdir()} == FILES
    for once in ("this process has 1 partition", f"step {STEPS}/{STEPS}", "held-out loss", "measured", "files"):
        assert ended.stdout.count(once) == 1
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
