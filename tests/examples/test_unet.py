"""examples/unet.py: it learns, its figures mean what they say, and mistakes cost one line."""

import itertools
import re
import signal
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from pipework.skip.layout import skip_edges
from tests.programs import RunPython

SCRIPT = Path(__file__).parents[2] / "examples" / "unet.py"
TINY = ["--size", "16", "--width", "4", "--levels", "2", "--batch-size", "16", "--chunks", "4"]
FIXED = [*TINY, "--balance", "10", "11"]  # nothing is measured, so that two runs are alike


@pytest.mark.thorough
def test_a_user_sees_it_learn_without_any_warning(
    run_python: RunPython, environment: dict[str, str], tmp_path: Path
) -> None:
    command = [SCRIPT, *TINY, "--steps", "60", "--timeline", tmp_path / "unet.svg"]
    ended = run_python(command, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "21 layers in 2 partitions" in ended.stdout
    assert ended.stdout.count(" s left\n") == 10
    after, before = map(float, re.findall(r"held-out loss (\S+), before the training (\S+)", ended.stdout)[0])
    assert after < 0.6 * before
    ious = [float(iou) for iou in re.findall(r"(?:disk|square) (\d\.\d\d)", ended.stdout)]
    assert len(ious) == 2
    assert max(ious) > 0.1
    assert "\x1b" not in ended.stdout
    titles = list(ElementTree.parse(tmp_path / "unet.svg").getroot().itertext())
    assert sum(title.startswith(("predicted", "measured")) for title in titles) == 2


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
def test_checkpointing_changes_nothing_but_memory(
    script: ModuleType, capsys: pytest.CaptureFixture[str], checkpoint: str
) -> None:
    assert script.main([*FIXED, "--steps", "3"]) == 0
    never = re.findall(r"loss [\d.]+|disk \d.*", capsys.readouterr().out)
    assert script.main([*FIXED, "--steps", "3", "--checkpoint", checkpoint]) == 0
    assert re.findall(r"loss [\d.]+|disk \d.*", capsys.readouterr().out) == never
    assert len(never) == 5
    assert script.main([*FIXED, "--steps", "3", "--seed", "1"]) == 0
    assert re.findall(r"loss [\d.]+|disk \d.*", capsys.readouterr().out) != never


def test_every_level_has_a_skip_connection_of_its_own(script: ModuleType) -> None:
    model = script.unet(width=2, count=4)
    edges = skip_edges([nn.Sequential(layer) for layer in model])
    ways = [(edge.source, *edge.destinations) for edge in edges]
    assert len(ways) == len({edge.key for edge in edges}) == 3
    assert all(outer[0] < inner[0] < inner[1] < outer[1] for outer, inner in itertools.pairwise(ways))
    assert model(torch.zeros(2, 1, 16, 16)).shape == (2, 3, 16, 16)


def test_ctrl_c_tests_what_was_learnt_so_far(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_step, steps = script.train_step, []

    def interrupted_step(*arguments: object) -> float:
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return train_step(*arguments)

    monkeypatch.setattr(script, "train_step", interrupted_step)
    assert script.main([*FIXED, "--steps", "1000"]) == 130
    out = capsys.readouterr().out
    assert len(steps) == 3
    assert "stopped after step 3" in out
    assert "intersection over union: disk" in out
