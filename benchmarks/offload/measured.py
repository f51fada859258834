"""Small transformers on two CPU workers, run: the bytes that their stages hold beside those that are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework import Pipe

WORKERS, BLOCKS, ROWS = 2, 8, 4
TARGET = 1.05


@dataclass(frozen=True)
class Setting:
    """A pipe.

    Attributes:
        schedule: its name.
        stages: of each worker.
        checkpoint: see `Pipe`.
        keep: how many micro-batches of a stage stay on the device; None: all.
    """

    schedule: str
    stages: int
    checkpoint: str = "never"
    keep: int | None = None

    def __str__(self) -> str:
        offload = "" if self.keep is None else f", offload={self.keep or 'activations'}"
        return f"{self.schedule}, {self.stages} a worker, {self.checkpoint}{offload}"


SETTINGS = [
    Setting(schedule, stages, checkpoint, keep)
    for schedule, stages in (("gpipe", 1), ("interleaved-1f1b", 4))
    for checkpoint, keep in (*(("never", keep) for keep in (None, 0, 1, 2)), ("always", None), ("always", 0))
]


@dataclass(frozen=True)
class Peaks:
    """The most bytes that each worker's micro-batches hold, and whether gradients have the bits of a pipe without."""

    predicted: tuple[float, ...]
    recorded: tuple[float, ...]
    same_bits: bool


def measure(setting: Setting, width: int, tokens: int, chunks: int) -> Peaks:
    """Predicts a step, and records it."""
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS * chunks, tokens, width, generator=draw) for _ in range(2))

    def pipe_of(each: Setting) -> Pipe:
        torch.manual_seed(0)
        options = {"dropout": 0.1, "batch_first": True, "norm_first": True}
        layers = nn.Sequential(*(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(BLOCKS)))
        stages = WORKERS * each.stages
        return Pipe(
            layers, chunks, each.checkpoint, schedule=each.schedule, loss_fn=F.mse_loss, devices=["cpu"] * WORKERS,
            balance=[BLOCKS // stages] * stages, offload=False if each.keep is None else each.keep or "activations",
        )  # fmt: skip

    def gradients(pipe: Pipe) -> list[torch.Tensor]:
        pipe.zero_grad()
        torch.manual_seed(2)
        pipe(x, target=y).backward()
        return harness.gradients_of(pipe)

    pipe = pipe_of(setting)
    predicted = pipe.predict(x, target=y, timeout=0.0).simulation.peak_memory
    gradients(pipe)  # the first mini-batches compare and inspect
    with pipe.record() as recording:
        found = gradients(pipe)
    wanted = gradients(pipe_of(replace(setting, keep=None)))
    same = all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    line = recording.timeline()
    return Peaks(predicted, tuple(line.peak_memory(worker) for worker in range(WORKERS)), same)


def report(found: dict[Setting, Peaks]) -> list[Verdict]:
    """Prints the table; returns the verdicts."""
    print("\npeaks of both CPU workers, measured: MB (1e6 bytes); `of all` is the recorded peak's share of never's\n")
    rows = []
    for setting, peaks in found.items():
        plain = found[replace(setting, checkpoint="never", keep=None)]
        rows.append(
            [
                str(setting), *_megabytes(peaks.predicted), *_megabytes(peaks.recorded),
                f"{100 * (worst(peaks) - 1):.1f}%", f"{max(peaks.recorded) / max(plain.recorded):.0%}",
                "yes" if peaks.same_bits else "NO",
            ]
        )  # fmt: skip
    harness.print_table(
        ["", "predicted, 0", "1", "recorded, 0", "1", "apart by", "of all", "bits of a pipe without offload"], rows
    )
    wrong = sum(not peaks.same_bits for peaks in found.values())
    return [
        Verdict("peaks recorded beside predicted, worst worker", max(map(worst, found.values())), TARGET, "x"),
        Verdict("pipes whose gradients have other bits with offload", wrong, 0, "of them"),
    ]


def worst(peaks: Peaks) -> float:
    """The largest ratio of a recorded and a predicted peak."""
    return max(map(harness.factor, peaks.recorded, peaks.predicted))


def _megabytes(sizes: Sequence[float]) -> list[str]:
    return [f"{size / 1e6:.2f}" for size in sizes]
