"""When does a zero-bubble schedule pay?

Two workers on two cores, a stack of equal linear layers, from tiny to large. Zero-bubble schedules have a shorter
bubble, but each operator costs the host more in two halves. So they win where operators are large and micro-batches
few. All schedules take turns; the table says what a step takes, as a share of what it takes without halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework.pipe import Pipe
from pipework.schedule import Costs, build, schedule_spec, simulate

WORKERS = 2
LAYERS = 16
PAIRS = (("zb-h1", "1f1b"), ("zb-v", "1f1b"), ("zb-v", "interleaved-1f1b"))
"""A zero-bubble schedule, and one without halves."""
SCHEDULES = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))


@dataclass(frozen=True)
class Case:
    """A model and its micro-batches.

    Attributes:
        width: of the layers, and rows of a micro-batch.
        chunks: how many micro-batches.
    """

    width: int
    chunks: int

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(LAYERS)),
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return torch.randn(self.chunks * self.width, self.width), torch.randn(self.chunks * self.width, self.width)

    def step(self, schedule: str) -> tuple[nn.Module, harness.Candidate]:
        """A pipe's training step without the optimizer's."""
        stages = WORKERS * schedule_spec(schedule).stages_per_worker
        pipe = Pipe(
            self.model(),
            self.chunks,
            "never",
            balance=[LAYERS // stages] * stages,
            devices=["cpu"] * WORKERS,
            schedule=schedule,
            loss_fn=nn.functional.mse_loss,
        )
        batch, target = self.batch()
        return pipe, harness.timed(lambda: pipe(batch, target=target).backward(), pipe.zero_grad)

    def plain(self) -> harness.Candidate:
        """Forward and backward of one micro-batch on one core."""
        model = self.model()
        batch, target = (each[: self.width] for each in self.batch())
        return harness.timed(lambda: nn.functional.mse_loss(model(batch), target).backward(), model.zero_grad)


@dataclass(frozen=True)
class Result:
    """Of one case, the seconds of a micro-batch on one core, and those of a step."""

    plain: float
    seconds: dict[str, list[float]]

    def share(self, split: str, whole: str) -> float:
        return harness.median_ratio(self.seconds[split], self.seconds[whole])


def ideal(split: str, whole: str, chunks: int) -> float:
    """The same share, simulated, if halves cost nothing."""
    spans = []
    for name in (split, whole):
        schedule = build(name, workers=WORKERS, chunks=chunks)
        spans.append(simulate(schedule, Costs(1 / schedule.stages, 2 / schedule.stages)).makespan)
    return spans[0] / spans[1]


def measure(case: Case, seconds: float) -> Result:
    pipes, steps = {}, {}
    for schedule in SCHEDULES:
        pipes[schedule], steps[schedule] = case.step(schedule)
        steps[schedule]()
    first, *others = ([each.grad for each in pipe.parameters()] for pipe in pipes.values())
    for gradients in others:
        for one, other in zip(first, gradients, strict=True):
            assert torch.equal(one, other), "the schedules do not compute the same"  # type: ignore[arg-type]
    plain = harness.alternate({"plain": case.plain()}, rounds=9)["plain"]
    return Result(median(plain), harness.alternate(steps, harness.rounds_within(seconds, steps, least=5, most=500)))


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--seconds", 8.0, 1.0, "for each row of the table")
    options.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 192, 256, 384, 512], help="of layers")
    options.add_argument("--chunks", type=int, nargs="+", default=[4, 8, 32], help="(default 4 8 32)")
    arguments = options.parse_args(argv)
    with harness.on_this_machine() as machine:
        results = {
            case: measure(case, arguments.seconds)
            for case in (Case(width, chunks) for chunks in arguments.chunks for width in arguments.widths)
        }
    verdicts = report(results, arguments.chunks)
    content = {"runs": [{**vars(case), **vars(result)} for case, result in results.items()]}
    harness.conclude("zero_bubble", arguments, machine, verdicts, content)


def report(results: dict[Case, Result], chunks: Sequence[int]) -> list[Verdict]:
    """Prints the table; the largest layers are to win with the fewest micro-batches."""
    print(f"{LAYERS} linear layers on {WORKERS} workers; a step's time as a share, medians of the rounds' ratios\n")
    header = ["micro-batches", "width", "one layer, F and B", *(f"{split} / {whole}" for split, whole in PAIRS)]
    rows = []
    for count in chunks:
        rows.append([str(count), "any", "simulated", *(f"{ideal(*pair, count):.3f}" for pair in PAIRS)])
        for case, result in results.items():
            if case.chunks == count:
                shares = [f"{result.share(*pair):.3f}" for pair in PAIRS]
                rows.append([str(count), str(case.width), f"{1e6 * result.plain / LAYERS:.0f} us", *shares])
    harness.print_table(header, rows)
    best = min(results, key=lambda case: (case.chunks, -case.width))
    return [
        Verdict(
            f"{split} beside {whole}, width {best.width}, micro-batches: {best.chunks}",
            results[best].share(split, whole),
            1.0,
            "x",
        )
        for split, whole in PAIRS
    ]


if __name__ == "__main__":
    main()
