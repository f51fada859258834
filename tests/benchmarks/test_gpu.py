"""The benchmark `gpu`: what it compares, what it does with a case that fails, and how workers get parts of a card."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import harness
from benchmarks.gpu import parts, run
from benchmarks.gpu.card import Card
from benchmarks.gpu.measure import Case, Measured, difference, measure
from benchmarks.gpu.ways import Way, plain
from pipework import Pipe
from pipework.testing import draw_key, reference_step
from tests.programs import RunPython

ROOT = Path(__file__).resolve().parents[2]
LOSS = nn.functional.mse_loss
CPU = Card(torch.device("cpu"), 1e12)


def test_a_difference_is_a_share_of_the_largest_element() -> None:
    cases = {0.0: [2.0, 4.0], 0.25: [2.0, 3.0], math.inf: [2.0, math.nan]}
    for wanted, got in cases.items():
        assert difference([torch.tensor(got)], [torch.tensor([2.0, 4.0])]) == wanted
    assert difference([torch.tensor([1e-9])], [torch.zeros(1)]) == math.inf  # what was to be zero


def test_a_way_that_fails_or_has_other_gradients_is_named_and_the_others_are_measured(capsys: Any) -> None:
    batch = torch.randn(4, 2), torch.randn(4, 2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def broken() -> Way:
        raise RuntimeError("no memory\nand more lines")

    def other() -> Way:
        return plain(copy.deepcopy(model), lambda output, target: 2 * LOSS(output, target), 2, sms=1)

    def one_shape() -> Way:
        way = plain(copy.deepcopy(model), LOSS, 2, sms=1)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            assert x is batch[0], "another mini-batch"
            LOSS(way.model(x), y).backward()

        return Way(way.model, step, sms=1)

    made = {"plain": lambda: plain(copy.deepcopy(model), LOSS, 2, sms=1), "broken": broken}
    ways = made | {"other": other, "one shape": one_shape}
    short = batch[0].clone(), batch[1].clone()
    outcome = measure(Case(batch, short, tokens=4, flops=1.0, ways=ways), CPU, rounds=3, seconds=0.0)
    assert list(outcome.measured) == ["plain", "other", "one shape"]
    run.report("case", outcome, CPU)
    printed = capsys.readouterr()
    assert " not compared |" in printed.out
    assert outcome.errors["broken"] == "RuntimeError: no memory"
    assert "other gradients: they differ by" in outcome.errors["other"]
    assert outcome.measured["other"].difference == pytest.approx(1.0)
    assert [len(each.seconds) for each in outcome.measured.values()] == [3, 3, 3]
    assert "no memory\nand more lines" in printed.err


def test_a_case_that_takes_too_long_is_a_line_and_what_was_measured_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    status = run.main(["--device", "cpu", "--case", "plain", "llama", "--limit", "0.05", "--save"])
    assert status == 1
    assert "FAILED: llama: ended after 0.05 s" in capsys.readouterr().out
    (saved,) = tmp_path.iterdir()
    assert list(json.loads(saved.read_text())["cases"]) == ["plain", "llama"]


@pytest.mark.thorough
@pytest.mark.usefixtures("recorded_graphs")
def test_pipes_that_capture_are_compared_when_they_replay(capsys: Any) -> None:
    options = ["--device", "cpu", "--rounds", "3", "--seconds", "0", "--case", "graphs-small"]
    assert run.main(options) == 0
    printed = capsys.readouterr().out
    assert "| 1f1b, graphs " in printed
    assert "| zb-h1, graphs" in printed
    assert "REACHED: graphs-small: the largest difference of gradients: 0 " in printed


def test_the_ideal_of_captured_pipes_is_that_of_stages_at_the_same_time() -> None:
    plain, at_once = Measured([8.0], sms=1), Measured([2.5], sms=4)
    pipe = Measured([4.0], [0.001], sms=4, ours=True, ideal=0.375, actions=100)
    found = {"plain": plain, "stages at once": at_once, "1f1b, graphs": pipe}
    host, ideal = run._captured("case", found)
    assert host.measured == pytest.approx(10.0)
    assert ideal.measured == pytest.approx(4.0 / (2.5 * 4 * 0.375))


@pytest.mark.thorough
def test_other_libraries_and_llamas_compute_the_same_gradients(run_python: RunPython) -> None:
    cases = {
        "one-stage": "torch.distributed.pipelining",
        "llama": "two stages",
        "llama-graphs": "two stages, graphs",
    }
    options = ["--device", "cpu", "--rounds", "3", "--seconds", "0", "--case", *cases]
    done = run_python(["-m", "benchmarks.gpu.run", *options], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for case, way in cases.items():
        assert f"| {way}" in done.stdout
        assert f"REACHED: {case}: the largest difference of gradients: 0 " in done.stdout
    assert done.stdout.count("to reach") == len(cases)  # tiny models on the CPU say nothing about speed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: Any) -> None:
    assert run.main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("debug", [(), "one_thread"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_workers_compute_in_the_streams_of_their_parts(schedule: str, debug: Any) -> None:
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    streams = [torch.Stream(device) for _ in range(2)]
    seen = set()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to(device)
    reference = copy.deepcopy(model)
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.add(torch.accelerator.current_stream(device)))
    pipe = Pipe(model, 4, schedule=schedule, loss_fn=LOSS, devices=[device] * 2, debug=debug)
    parts.compute_on(pipe, [parts.Part(stream, 1) for stream in streams])
    x, y = torch.randn(8, 8).to(device), torch.randn(8, 8).to(device)
    torch.manual_seed(0)
    wanted = reference_step(reference, x, y, LOSS, 4, draw_key())
    torch.manual_seed(0)
    loss = pipe(x, target=y)
    loss.backward()
    assert seen == {*streams}
    assert torch.equal(loss, wanted.loss)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(pipe.parameters(), reference.parameters(), strict=True))
