"""What does the runtime itself cost, per stage and micro-batch?

Stages that multiply one number by one parameter, so that hardly anything is left but the host's work. A plain loop does
the same with the un-partitioned model: forward of each micro-batch, then backward of each. What a pipe needs longer,
divided by stages and micro-batches, is its overhead. A straight line through several numbers of micro-batches tells
apart what a step costs once and what each micro-batch adds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from a checkout as it is

from benchmarks.measure import (
    Candidate,
    Verdict,
    alternate,
    conclude,
    line_fit,
    on_this_machine,
    parser,
    print_table,
    quartiles,
    timed,
)
from pipework.pipe import Pipe

QUOTED = 64  # micro-batches
TARGETS = {1: 8.0, 2: 12.0}  # workers: microseconds


class Scale(nn.Module):
    """Multiplies by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.01))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def model_of(stages: int) -> nn.Sequential:
    return nn.Sequential(*(Scale() for _ in range(stages)))


def plain_loop(model: nn.Module, batch: Tensor, gradient: Tensor) -> Callable[[], None]:
    """All forwards, then all backwards. Its micro-batches lie ready; the pipe makes its own and joins their outputs."""
    inputs = batch.split(1)
    gradients = gradient.split(1)

    def run() -> None:
        outputs = [model(piece) for piece in inputs]
        for output, output_gradient in zip(outputs, gradients, strict=True):
            torch.autograd.backward(output, output_gradient)

    return run


def piped(pipe: nn.Module, batch: Tensor, gradient: Tensor) -> Callable[[], None]:
    """One mini-batch with the loss outside."""

    def run() -> None:
        pipe(batch).backward(gradient)

    return run


def candidates(workers: int, micro_batches: int) -> dict[str, Candidate]:
    """The plain loop and the pipe, which must leave the same gradients."""
    batch, gradient = torch.randn(micro_batches), torch.randn(micro_batches)
    model = model_of(workers)
    pipe = Pipe(model_of(workers), micro_batches, "never", balance=[1] * workers, devices=["cpu"] * workers)
    loop, pipeline = plain_loop(model, batch, gradient), piped(pipe, batch, gradient)
    loop()
    pipeline()
    for expected, got in zip(model.parameters(), pipe.parameters(), strict=True):
        assert torch.equal(expected.grad, got.grad), "the pipe and the plain loop do not compute the same"
    return {"plain": timed(loop, model.zero_grad), "pipe": timed(pipeline, pipe.zero_grad)}


def measure(workers: int, chunks: list[int], seconds_each: float) -> dict[int, dict[str, list[float]]]:
    """For each number of micro-batches the seconds of both, in turns."""
    result = {}
    for micro_batches in chunks:
        both = candidates(workers, micro_batches)
        once = sum(sum(times) for times in alternate(both, rounds=3).values()) / 3
        rounds = min(2000, max(3, int(seconds_each / once)))
        result[micro_batches] = alternate(both, rounds, warm_up=5)
    return result


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, help="for each line of the table (default 3; with --quick 0.5)")
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="(default 1 2 4 8)")
    options.add_argument("--chunks", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="(default 8 16 32 64 128)")
    arguments = options.parse_args(argv)
    seconds_each = arguments.seconds or (0.5 if arguments.quick else 3.0)

    with on_this_machine() as machine:
        measured = {workers: measure(workers, arguments.chunks, seconds_each) for workers in arguments.workers}

    verdicts = report(measured)
    results = {
        "unit": "seconds of one mini-batch",
        "runs": [
            {
                "workers": workers,
                "micro_batches": micro_batches,
                **{name: summary(times) for name, times in both.items()},
            }
            for workers, by_chunks in measured.items()
            for micro_batches, both in by_chunks.items()
        ],
    }
    conclude("overhead", arguments, machine, verdicts, results)


def summary(times: list[float]) -> dict[str, object]:
    low, high = quartiles(times)
    return {"median": median(times), "quartiles": [low, high], "fastest": min(times), "runs": len(times)}


def report(measured: dict[int, dict[int, dict[str, list[float]]]]) -> list[Verdict]:
    """Prints both tables; returns what was to be reached."""
    print("microseconds per stage and micro-batch, forward and backward, one stage for each worker; medians\n")
    rows, fits, verdicts = [], [], []
    for workers, by_chunks in measured.items():
        excess = {}
        for micro_batches, both in by_chunks.items():
            parts = workers * micro_batches
            differences = [pipe - plain for pipe, plain in zip(both["pipe"], both["plain"], strict=True)]
            low, high = quartiles(differences)
            excess[micro_batches] = median(differences) * 1e6
            rows.append(
                [
                    str(workers),
                    str(micro_batches),
                    *(f"{median(both[name]) * 1e6 / parts:.1f}" for name in ("plain", "pipe")),
                    f"{excess[micro_batches] / parts:.1f}",
                    f"{low * 1e6 / parts:.1f} to {high * 1e6 / parts:.1f}",
                    f"{(min(both['pipe']) - min(both['plain'])) * 1e6 / parts:.1f}",
                ]
            )
        if len(excess) > 1:
            fixed, slope = line_fit(list(excess), list(excess.values()))
            fits.append([str(workers), f"{fixed:.0f}", f"{fixed / workers:.0f}", f"{slope / workers:.1f}"])
        if workers in TARGETS and QUOTED in excess:
            value = excess[QUOTED] / workers / QUOTED
            what = f"overhead, workers: {workers}, micro-batches: {QUOTED}"
            verdicts.append(Verdict(what, value, TARGETS[workers], "us"))
    print_table(["workers", "micro-batches", "plain loop", "pipe", "overhead", "middle half", "fastest runs"], rows)
    if fits:
        print("\na straight line through the overheads of a step: microseconds\n")
        print_table(["workers", "once a step", "once a step, per stage", "each micro-batch, per stage"], fits)
    return verdicts


if __name__ == "__main__":
    main()
