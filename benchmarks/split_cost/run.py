"""What does it cost the host to split a backward in two halves?

The same stage on one worker, all forwards first, then all backwards: once whole, once each as an I and a W. Both take
turns. Most stages are so small that hardly anything is left but the host's work: with real sizes it disappears beside
the arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from benchmarks import harness
from benchmarks.feed_forward import FeedForward
from benchmarks.harness import Verdict
from pipework.pipe import Pipe
from pipework.schedule import Action, Schedule, fill_drain

CHUNKS = 16
LINEAR_TARGET, ALL_TARGET = 1.15, 1.35
OPERATOR_TARGET = 5.0  # microseconds


@dataclass(frozen=True)
class Case:
    """A stage.

    Attributes:
        layer: makes one of its layers, of a width.
        width: of the layers, and rows of a micro-batch.
        layers: how many.
        operators: of a layer that can be split.
    """

    layer: Callable[[int], nn.Module]
    width: int
    layers: int = 1
    operators: int = 1

    def pipe(self, schedule: Schedule) -> Pipe:
        torch.manual_seed(0)
        layers = nn.Sequential(*(self.layer(self.width) for _ in range(self.layers)))
        return Pipe(layers, CHUNKS, "never", balance=[self.layers], devices=["cpu"], schedule=schedule)


def square(width: int) -> nn.Module:
    return nn.Linear(width, width)


CASES: Mapping[str, Case] = {
    "linear, width 16": Case(square, 16),
    "linear, width 64": Case(square, 64),
    "linear, width 128": Case(square, 128),
    "linear, width 512": Case(square, 512),
    "32 x linear, width 16": Case(square, 16, layers=32),
    "32 blocks, width 16": Case(FeedForward, 16, layers=32, operators=2),
}


def halves() -> Schedule:
    """All forwards, then all backwards, each in two halves."""
    forwards = [Action("F", 0, each) for each in range(CHUNKS)]
    backwards = [Action(kind, 0, each) for each in range(CHUNKS) for kind in ("I", "W")]
    return Schedule("halves", (0,), ((*forwards, *backwards),))


class Step:
    """A candidate; keeps what its forward and its backward took."""

    def __init__(self, case: Case, schedule: Schedule) -> None:
        self.pipe = case.pipe(schedule)
        self.batch = torch.randn(CHUNKS * case.width, case.width, requires_grad=True)
        self.gradient = torch.ones_like(self.batch)
        self.forwards: list[float] = []
        self.backwards: list[float] = []

    def __call__(self) -> float:
        self.pipe.zero_grad()
        self.batch.grad = None
        start = time.perf_counter()
        output = self.pipe(self.batch)
        between = time.perf_counter()
        output.backward(self.gradient)
        end = time.perf_counter()
        self.forwards.append(between - start)
        self.backwards.append(end - between)
        return end - start

    def medians(self, rounds: int) -> tuple[float, float]:
        """Microseconds of a micro-batch, in the last rounds."""
        forward, backward = (median(times[-rounds:]) for times in (self.forwards, self.backwards))
        return 1e6 * forward / CHUNKS, 1e6 * backward / CHUNKS


@dataclass(frozen=True)
class Cost:
    """Microseconds of a micro-batch."""

    forward: float
    backward: float
    split_forward: float
    halves: float

    @property
    def of_backward(self) -> float:
        return self.halves / self.backward

    @property
    def of_all(self) -> float:
        return (self.split_forward + self.halves) / (self.forward + self.backward)

    def each(self, operators: int) -> float:
        """What each operator takes longer."""
        return (self.split_forward + self.halves - self.forward - self.backward) / operators


def measure(case: Case, seconds: float) -> Cost:
    torch.manual_seed(0)
    whole, split = Step(case, fill_drain(1, CHUNKS)), Step(case, halves())
    split.batch = whole.batch.detach().requires_grad_()
    candidates = {"whole": whole, "split": split}
    rounds = harness.rounds_within(seconds, candidates, least=5, most=2000)
    for one, other in zip(whole.pipe.parameters(), split.pipe.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad), "the halves do not compute the same"
    harness.alternate(candidates, rounds)
    return Cost(*whole.medians(rounds), *split.medians(rounds))


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--seconds", 8.0, 1.0, "for each row of the table")
    arguments = options.parse_args(argv)
    with harness.on_this_machine() as machine:
        costs = {name: measure(case, arguments.seconds) for name, case in CASES.items()}
    verdicts = report(costs)
    results = {"unit": "microseconds of a micro-batch", "costs": {name: vars(each) for name, each in costs.items()}}
    harness.conclude("split_cost", arguments, machine, verdicts, results)


def report(costs: Mapping[str, Cost]) -> list[Verdict]:
    """Prints the table; returns the verdicts."""
    rows, verdicts = [], []
    for name, cost in costs.items():
        case = CASES[name]
        operators = case.layers * case.operators
        numbers = [f"{value:.1f}" for value in vars(cost).values()]
        rows.append([name, *numbers, f"{cost.of_backward:.2f}", f"{cost.of_all:.2f}", f"{cost.each(operators):.1f}"])
        if case.layer is square:
            verdicts.append(Verdict(f"{name}, (I + W) / B", cost.of_backward, LINEAR_TARGET, "x"))
        if case.layers > 1:
            verdicts.append(Verdict(f"{name}, (F + I + W) / (F + B)", cost.of_all, ALL_TARGET, "x"))
            verdicts.append(Verdict(f"{name}, more for each operator", cost.each(operators), OPERATOR_TARGET, "us"))
    print("microseconds of a micro-batch, one worker; medians of both in turns\n")
    header = ["F", "B", "F, split", "I + W", "(I + W) / B", "(F + I + W) / (F + B)", "more for each operator"]
    harness.print_table(["", *header], rows)
    return verdicts


if __name__ == "__main__":
    main()
