"""Every benchmark runs, at a size too small to say anything about speed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import harness
from benchmarks.memory import v_half
from benchmarks.memory.live import CALLER, LiveStorages
from benchmarks.planned_step import run as planned_step
from benchmarks.split_cost import run as split_cost
from tests.programs import RunPython

ROOT = Path(__file__).resolve().parents[2]

TINY = {
    "receive_order": ["--workers", "2", "--chunks", "4"],  # the first one is what `make test` runs
    "two_stage_speed": [
        *("--rounds", "1", "--recorded", "1", "--predict", "0"),
        *("--width", "16", "--tokens", "4", "--chunks", "4"),
    ],
    "overhead": [
        *("--seconds", "0.01", "--workers", "1", "2", "--stages", "2"),
        *("--chunks", "2", "64", "--schedules", "1f1b", "interleaved-1f1b", "zb-v"),
    ],
    "counts": ["--rounds", "1", "--schedules", "zb-h1", "--workers", "1", "--stages", "1"],
    "p2p_overhead": ["--rounds", "1", "--sizes", "tiny", "--chunks", "4"],
    "many_workers": ["--rounds", "1", "--workers", "2", "3", "--milliseconds", "1", "--micro-batches", "3"],
    "zero_bubble": ["--seconds", "0.01", "--widths", "8", "16", "--chunks", "2", "4"],
    "unet_speed": [
        *("--rounds", "1", "--levels", "2", "--width", "4", "--size", "8"),
        *("--rows", "1", "--chunks", "2", "--balance", "21", "18"),
    ],
    "memory": ["--stages", "2", "--chunks", "2", "--width", "16", "--tokens", "8", "--size", "16"],
    "migration_speed": [
        *("--rounds", "1", "--modes", "never", "--rows", "1", "--chunks", "2", "--width", "16", "--tokens", "4"),
        *("--channels", "4", "--size", "16", "--balance", "28", "27"),
    ],
    "scale": ["--sizes", "2x2", "4x8"],
    "schedule_speed": ["--quick", "--rounds", "1", "--largest", "16"],
    "detection": ["--rounds", "1", "--detect", "2.5", "--kinds", "exception"],
    "host_launch": ["--rounds", "1", "--stages", "2", "--blocks", "0", "--micro-batches", "2"],
    "gpu": ["--device", "cpu", "--rounds", "3", "--seconds", "0", "--case", "two-parts"],
    "glue": ["--rounds", "1", "--blocks", "2", "--parts", "2"],
    "stream_operations": ["--stages", "2"],
    "partition": ["--quick", "--problems", "1", "--largest", "97"],
    "planning": ["--iterations", "10", "--only", "unet_unequal"],
    "planning_scale": ["--sizes", "2x4", "--seconds", "0.2"],
    "sharding": ["--rounds", "1", "--width", "8", "--large", "16", "--only", "fsdp, 1f1b"],
    "offload": ["--quick", "--models", "tiny", "--tokens", "8", "--stages", "2", "--rows", "4", "--iterations", "5"],
    "grain": ["--seconds", "0.01", "--milliseconds", "0.1", "1", "--micro-batches", "2"],
}
# They run on the simulated accelerator, which needs a compiler.
ON_SIMULATED = {"stream_operations"}


@pytest.fixture
def run(run_python: RunPython) -> Callable[..., str]:
    def run(name: str, *arguments: str, module: str = "run") -> str:
        done = run_python(["-m", f"benchmarks.{name}.{module}", *arguments], cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_all_benchmarks_are_here() -> None:
    assert {script.parent.name for script in ROOT.glob("benchmarks/*/run.py")} == {*TINY, *SMALL}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu if name in ON_SIMULATED else ()) for name in TINY]
)
def test_benchmark_prints_its_table_and_a_verdict(run: Callable[..., str], name: str) -> None:
    output = run(name, *TINY[name])
    assert "| " in output
    assert "load average" in output
    assert "REACHED: " in output or "MISSED: " in output


# The benchmarks whose own models take a minute: the name of their table, another one, and arguments.
SMALL: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "planned_step": (
        "TASKS",
        {
            "small": planned_step.Task(
                lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))),
                lambda: (torch.randn(32, 8), torch.randn(32, 8)),
                nn.functional.mse_loss,
            )
        },
        ["--quick", "--rounds", "1"],
    ),
    "split_cost": ("CASES", {"small": split_cost.Case(split_cost.square, 16, layers=2)}, ["--seconds", "0.01"]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SMALL)
def test_benchmark_of_small_models(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, models, arguments = SMALL[name]
    run = {"planned_step": planned_step, "split_cost": split_cost}[name]
    monkeypatch.setattr(run, table, models)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    run.main(arguments)
    output = capsys.readouterr().out
    assert "| small" in output
    assert "REACHED: " in output or "MISSED: " in output


@pytest.mark.thorough
def test_a_llama_with_offload_is_compared_with_one_without(run: Callable[..., str]) -> None:
    pytest.importorskip("transformers")
    output = run("offload", "--device", "cpu", "--rounds", "3", "--seconds", "0")
    assert "| the CPU, offload |" in output
    assert output.count("REACHED: ") == 2


def test_what_schedules_hold_beside_1f1b_is_printed(run: Callable[..., str]) -> None:
    output = run("memory", "--workers", "2", "--width", "8", "--rows", "2", module="v_half")
    rows = [line.split(",")[0] for line in output.splitlines() if line.startswith("| ") and "2 workers" in line]
    assert rows == [f"| {name}" for name in v_half.NAMES]
    assert "of 1F1B's: " in output


@pytest.mark.thorough
def test_v_half_holds_three_quarters_of_1f1b_with_four_workers_whatever_the_clock_says() -> None:
    whole, half = (v_half.measure(name, workers=4, width=16, rows=8) for name in ("1f1b", "v-half"))
    assert max(half.measured) / max(whole.measured) == pytest.approx(3 / 4, rel=0.05)
    for case in (whole, half):
        assert case.measured == pytest.approx(case.simulated, rel=0.06)


def test_each_benchmark_has_a_page() -> None:
    overview = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for name in TINY:
        assert (ROOT / "benchmarks" / name / "README.md").is_file()
        assert f"{name}/README.md" in overview


def test_candidates_take_turns_and_another_one_comes_first_in_each_round() -> None:
    order = []

    def candidate(name: str) -> harness.Candidate:
        def run_once() -> float:
            order.append(name)
            return float(len(order))

        return run_once

    seconds = harness.alternate({"a": candidate("a"), "b": candidate("b")}, rounds=3, warm_up=1)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert seconds == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


def test_lines_ratios_and_verdicts() -> None:
    assert harness.line_fit([1.0, 2.0, 5.0], [5.0, 7.0, 13.0]) == pytest.approx((3.0, 2.0))
    assert harness.median_ratio([2.0, 30.0, 6.0], [1.0, 10.0, 1.0]) == 3.0
    assert harness.Verdict("x", 1.04, 1.05, "x").reached
    assert str(harness.Verdict("overhead", 9.0, 8.0, "us")) == "MISSED: overhead: 9 us, to reach at most 8 us"


def test_saved_results_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    with harness.on_this_machine() as machine:
        pass
    path = harness.save("name", machine, [harness.Verdict("w", 2.0, 1.0, "s")], {"seconds": [1.0]})
    content = json.loads(path.read_text(encoding="utf-8"))
    assert path.name.endswith("-name.json")
    assert content["seconds"] == [1.0]
    assert content["machine"]["cores"] >= 1
    assert content["verdicts"] == [{"what": "w", "measured": 2.0, "target": 1.0, "unit": "s", "reached": False}]


def test_live_storages_are_seen_with_what_operators_keep_and_let_go() -> None:
    x, weight, gradient = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    storages = LiveStorages()
    with storages.watching([x, weight, gradient]):
        kept = (x @ weight).tanh()  # the product is needed in passing
        assert storages.alive() == kept.nbytes
        kept.view(-1)  # no memory of its own
        kept.backward(gradient)
        storages.label([weight.grad], "parameter gradient")
        del kept
    assert storages.alive() == weight.nbytes
    assert storages.peak(CALLER, lambda block: not block.gradient) == 2 * x.nbytes
    assert storages.peak_kept(CALLER, lambda block: not block.gradient) == x.nbytes
    assert storages.peak(CALLER, lambda block: block.label != "") == weight.nbytes
