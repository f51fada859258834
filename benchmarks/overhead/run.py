"""What does the runtime itself cost, per stage and micro-batch, with every schedule?

Stages that multiply one number by one parameter, so that hardly anything is left but the host's work. A plain loop does
the same with the un-partitioned model, in the order of one worker. What a pipe needs longer, divided by stages and
micro-batches, is its overhead. A straight line through several numbers of micro-batches tells apart what a step costs
once and what each micro-batch adds; how far the points are from it shows whether a step is linear in micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.schedules import TRAINING, stages_per_worker
from pipework.pipe import Pipe
from pipework.schedule import build, schedule_spec

QUOTED = 64  # micro-batches
ONE_STAGE, ONE_WORKER, TWO_WORKERS = 8.0, 16.0, 12.0  # microseconds to reach at most; one stage: without halves
ONCE = 200.0  # microseconds of a step
LINEAR = 5.0  # percent that a step may be off the straight line
ALL_FORWARDS_FIRST = ("gpipe", "looped-bfs")


class Scale(nn.Module):
    """Multiplies by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.01))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """One small operator or two."""
    return (output * target).mean()


@dataclass(frozen=True)
class Case:
    """A pipe to be measured."""

    schedule: str
    workers: int
    stages_per_worker: int = 1
    inside: bool = True
    one_thread: bool = False

    @property
    def stages(self) -> int:
        return self.workers * self.stages_per_worker

    @property
    def name(self) -> str:
        way = ", one thread" if self.one_thread else ""
        return f"{self.schedule}{'' if self.inside else ', loss outside'}{way}"

    @property
    def target(self) -> float:
        """Microseconds for each stage and micro-batch that are to be reached."""
        if self.workers > 1:
            return TWO_WORKERS
        return ONE_WORKER if self.stages > 1 or build(self.schedule, workers=1, chunks=1).split_stages else ONE_STAGE

    def model(self) -> nn.Sequential:
        return nn.Sequential(*(Scale() for _ in range(self.stages)))

    def pipe(self, micro_batches: int) -> Pipe:
        return Pipe(
            self.model(),
            micro_batches,
            "never",
            balance=[1] * self.stages,
            devices=["cpu"] * self.workers,
            schedule=self.schedule,
            loss_fn=loss_of if self.inside else None,
            debug="one_thread" if self.one_thread else (),
        )


def cases(schedules: Sequence[str], workers: Sequence[int], stages: Sequence[int]) -> list[Case]:
    """With one worker all numbers of stages, with more of them the usual one."""
    result = [Case("gpipe", count, inside=False) for count in workers if "gpipe" in schedules]
    for schedule in schedules:
        for count in workers:
            wanted = stages if count == 1 else [schedule_spec(schedule).stages_per_worker]
            result.extend(Case(schedule, count, each) for each in stages_per_worker(schedule, count, wanted))
    return result


def plain_loop(case: Case, model: nn.Module, batch: Tensor, target: Tensor) -> Callable[[], None]:
    """Micro-batches lie ready; the pipe makes its own. The target of a loss outside is the output's gradient."""
    pairs = list(zip(batch.split(1), target.split(1), strict=True))
    share = 1 / len(pairs)

    def loss_outside() -> None:
        outputs = [model(piece) for piece, _ in pairs]
        for output, (_, gradient) in zip(outputs, pairs, strict=True):
            torch.autograd.backward(output, gradient)

    def all_forwards_first() -> None:
        losses = [loss_of(model(piece), wanted) * share for piece, wanted in pairs]
        for loss in losses:
            loss.backward()

    def one_by_one() -> None:
        for piece, wanted in pairs:
            (loss_of(model(piece), wanted) * share).backward()

    if not case.inside:
        return loss_outside
    return all_forwards_first if case.schedule in ALL_FORWARDS_FIRST else one_by_one


def piped(case: Case, pipe: Pipe, batch: Tensor, target: Tensor) -> Callable[[], None]:
    """One mini-batch."""
    if case.inside:
        return lambda: pipe(batch, target=target).backward()
    return lambda: pipe(batch).backward(target)


def candidates(case: Case, micro_batches: int) -> dict[str, harness.Candidate]:
    """The plain loop and the pipe; both must compute the same gradients."""
    batch, target = torch.randn(micro_batches), torch.randn(micro_batches)
    model, pipe = case.model(), case.pipe(micro_batches)
    loop, pipeline = plain_loop(case, model, batch, target), piped(case, pipe, batch, target)
    loop()
    pipeline()
    for expected, got in zip(model.parameters(), pipe.parameters(), strict=True):
        assert torch.equal(expected.grad, got.grad), "the pipe and the plain loop do not compute the same"
    return {"plain": harness.timed(loop, model.zero_grad), "pipe": harness.timed(pipeline, pipe.zero_grad)}


Times = dict[str, list[float]]


def measure(case: Case, chunks: Sequence[int], seconds_each: float) -> dict[int, Times]:
    """For each number of micro-batches the seconds of both, in turns."""
    result = {}
    for micro_batches in chunks:
        both = candidates(case, micro_batches)
        rounds = harness.rounds_within(seconds_each, both, least=3, most=2000)
        result[micro_batches] = harness.alternate(both, rounds, warm_up=5)
    return result


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--seconds", 3.0, 0.3, "for each number of the table")
    options.add_argument("--schedules", nargs="+", default=TRAINING, help="(default all that train)")
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="(default 1 2)")
    options.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8], help="of one worker (default 1 2 4 8)")
    options.add_argument("--chunks", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="(default 8 16 32 64 128)")
    arguments = options.parse_args(argv)
    with harness.on_this_machine() as machine:
        to_do = cases(arguments.schedules, arguments.workers, arguments.stages)
        measured = {case: measure(case, arguments.chunks, arguments.seconds) for case in to_do}

    verdicts = report(measured)
    results = {
        "unit": "seconds of one mini-batch",
        "runs": [
            {
                **vars(case),
                "micro_batches": micro_batches,
                **{name: summary(times) for name, times in both.items()},
            }
            for case, by_chunks in measured.items()
            for micro_batches, both in by_chunks.items()
        ],
    }
    harness.conclude("overhead", arguments, machine, verdicts, results)


def summary(times: list[float]) -> dict[str, object]:
    low, high = harness.quartiles(times)
    return {"median": median(times), "quartiles": [low, high], "fastest": min(times), "runs": len(times)}


def overhead(both: Times) -> float:
    """Of a step, in microseconds."""
    return 1e6 * median(pipe - plain for pipe, plain in zip(both["pipe"], both["plain"], strict=True))


def off_the_line(by_chunks: dict[int, Times]) -> float:
    """How far the pipe's steps are from a straight line through them, in percent of a step, at most."""
    steps = {micro_batches: median(both["pipe"]) for micro_batches, both in by_chunks.items()}
    fixed, slope = harness.line_fit(list(steps), list(steps.values()))
    return max(100 * abs(seconds / (fixed + slope * count) - 1) for count, seconds in steps.items())


def report(measured: dict[Case, dict[int, Times]]) -> list[Verdict]:
    """Prints both tables; returns the verdicts."""
    rows, fits, verdicts = [], [], []
    for case, by_chunks in measured.items():
        label = [case.name, str(case.workers), str(case.stages_per_worker)]
        excess = {micro_batches: overhead(both) for micro_batches, both in by_chunks.items()}
        most = max(by_chunks)
        plain, pipe = (1e6 * median(by_chunks[most][name]) / (case.stages * most) for name in ("plain", "pipe"))
        each = [f"{value / (case.stages * micro_batches):.1f}" for micro_batches, value in excess.items()]
        rows.append([*label, *each, f"{plain:.1f}", f"{pipe:.1f}"])
        what = f"{case.name}, workers: {case.workers}, stages per worker: {case.stages_per_worker}"
        if case.workers <= 2 and QUOTED in excess:
            value = excess[QUOTED] / case.stages / QUOTED
            verdicts.append(Verdict(f"{what}, micro-batches: {QUOTED}", value, case.target, "us"))
        if len(excess) > 2:
            fixed, slope = harness.line_fit(list(excess), list(excess.values()))
            off = off_the_line(by_chunks)
            fits.append([*label, f"{fixed:.0f}", f"{slope / case.stages:.1f}", f"{off:.1f}%"])
            if case.workers == 1:
                verdicts.append(Verdict(f"{what}, off the straight line", off, LINEAR, "%"))
            if case.stages == 1:
                verdicts.append(Verdict(f"{what}, once a step", fixed, ONCE, "us"))
    chunks = next(iter(measured.values()))
    print(
        "overhead in microseconds per stage and micro-batch, forward and backward, for some numbers of micro-batches;"
    )
    print(f"then what the plain loop and the pipe take for each, with {max(chunks)} of them; medians\n")
    label_names = ["schedule", "workers", "stages per worker"]
    harness.print_table([*label_names, *(f"m = {count}" for count in chunks), "plain loop", "pipe"], rows)
    if fits:
        print("\na straight line through the overheads of a step, microseconds; and how far a step is off its line\n")
        harness.print_table([*label_names, "once a step", "each stage and micro-batch", "off the line"], fits)
    return verdicts


if __name__ == "__main__":
    main()
