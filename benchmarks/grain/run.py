"""How large must an action be for a pipeline to pay?

Each stage computes for a given time, forward and backward, from 0.1 to 100 ms. Efficiency is the ideal step of the
schedule, which knows no cost but the actions', over the measured one. Two stages multiply matrices on two cores. More
stages than cores sleep instead, since a sleeping thread needs no core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.grain.kernels import MULTIPLYING, SLEEPING, Kernel
from benchmarks.grain.plot import Curve, draw
from benchmarks.harness import Verdict
from benchmarks.sleeping import without_timer_slack
from pipework.pipe import Pipe
from pipework.schedule import Costs, build, simulate

MILLISECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)
SCHEDULES = ("gpipe", "1f1b")
PLAIN, BARE = "plain", "bare"
TARGET = 1.0  # millisecond from which on a pipeline is to pay
PICTURE = Path(__file__).resolve().parent / "efficiency.svg"


@dataclass(frozen=True)
class Line:
    """What is measured for actions of all sizes."""

    kernel: Kernel
    stages: int

    @property
    def name(self) -> str:
        return f"{self.stages} stages, {self.kernel.name}"

    def speed_up(self, schedule: str, micro_batches: int) -> float:
        """Of the ideal step over one worker."""
        return 2 * self.stages * micro_batches / ideal_actions(schedule, self.stages, micro_batches)


LINES = (Line(MULTIPLYING, 2), Line(SLEEPING, 2), Line(SLEEPING, 4), Line(SLEEPING, 8))


@dataclass(frozen=True)
class Point:
    """What was measured for one size.

    Attributes:
        seconds: of an action, as asked for.
        alone: of an action without a pipeline: measured if it is real, with the host's work, else as asked for.
        efficiency: of each schedule, and of threads that do the same work without a pipeline if it is real.
        times: of each candidate, in seconds.
        slept: the mean real sleep over the asked one.
    """

    seconds: float
    alone: float
    efficiency: dict[str, float]
    times: dict[str, list[float]]
    slept: float | None


def ideal_actions(schedule: str, workers: int, micro_batches: int) -> float:
    """How many actions follow each other in the schedule's step if nothing else takes time."""
    return simulate(build(schedule, workers=workers, chunks=micro_batches), Costs(1.0, 1.0)).makespan


def loss_of(output: Tensor, _: Tensor) -> Tensor:
    """Next to nothing."""
    return output.sum()


def pipelined(layers: nn.Sequential, schedule: str, batch: Tensor, target: Tensor) -> Callable[[], None]:
    stages = len(layers)
    pipe = Pipe(
        layers,
        len(batch),
        "never",
        balance=[1] * stages,
        devices=["cpu"] * stages,
        schedule=schedule,
        loss_fn=loss_of,
    )
    return lambda: pipe(batch, target=target).backward()


def one_by_one(layers: nn.Module, batch: Tensor) -> Callable[[], None]:
    """All layers, micro-batch by micro-batch, on one thread."""
    pieces = [piece.detach().requires_grad_() for piece in batch.split(1)]

    def run() -> None:
        for piece in pieces:
            layers(piece).sum().backward()

    return run


def side_by_side(layers: nn.Sequential, batch: Tensor) -> Callable[[], None]:
    """Each layer on a thread of its own, none waiting for another: what the cores can do at best."""
    runs = [one_by_one(layer, batch) for layer in layers]
    threads = ThreadPoolExecutor(len(runs), initializer=one_intra_op_thread)

    def run() -> None:
        for each in [threads.submit(run) for run in runs]:
            each.result()

    return run


def one_intra_op_thread() -> None:
    """On a new thread."""
    torch.get_num_threads()  # a thread's first question would overwrite what was set before it
    torch.set_num_threads(1)


def measure(line: Line, seconds: float, micro_batches: int, seconds_each: float) -> Point:
    """One size of action: every schedule in turns, at least three times."""
    layers, alarm = line.kernel.layers(line.stages, seconds)
    batch, target = torch.zeros(micro_batches, 1, requires_grad=True), torch.zeros(micro_batches, 1)
    runs = {schedule: pipelined(layers, schedule, batch, target) for schedule in SCHEDULES}
    if line.kernel.real:
        runs |= {PLAIN: one_by_one(layers, batch), BARE: side_by_side(layers, batch)}
    candidates = {name: harness.timed(run) for name, run in runs.items()}
    once = sum(sum(times) for times in harness.alternate(candidates, rounds=1, warm_up=0).values())
    if alarm is not None:
        alarm.slept.clear()
    times = harness.alternate(candidates, rounds=min(100, max(3, round(seconds_each / once))), warm_up=0)

    actions = 2 * line.stages * micro_batches
    rounds = len(times[SCHEDULES[0]])
    alone = [each / actions for each in times[PLAIN]] if line.kernel.real else [seconds] * rounds
    shares = {schedule: ideal_actions(schedule, line.stages, micro_batches) for schedule in SCHEDULES}
    if line.kernel.real:
        shares[BARE] = actions / line.stages
    efficiency = {
        name: median(action * share / step for action, step in zip(alone, times[name], strict=True))
        for name, share in shares.items()
    }
    slept = None
    if alarm is not None:
        asked, real = (mean(column) for column in zip(*alarm.slept, strict=True))
        slept = real / asked
    return Point(seconds, median(alone), efficiency, times, slept)


def crossing(points: Sequence[tuple[float, float]], level: float) -> float:
    """From which size on a curve stays above a level; the smallest size if it always is, infinity if it is not.

    Between two points the curve is a straight line over the logarithm of the size.

    Example:
        >>> crossing([(1.0, 0.2), (100.0, 0.6)], 0.4)
        10.0
    """
    below = [number for number, (_, height) in enumerate(points) if height < level]
    if not below:
        return points[0][0]
    if below[-1] == len(points) - 1:
        return math.inf
    (left, low), (right, high) = points[below[-1] : below[-1] + 2]
    return left * (right / left) ** ((level - low) / (high - low))


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    shown = " ".join(f"{each:g}" for each in MILLISECONDS)
    options.add_argument("--milliseconds", type=float, nargs="+", default=MILLISECONDS, help=f"(default {shown})")
    options.add_amount("--seconds", 1.5, 0.3, "for each size of action")
    options.add_argument("--micro-batches", type=int, default=16, help="(default 16)")
    options.add_argument("--plot", type=Path, help="where to draw the curves; with --save also beside the README")
    arguments = options.parse_args(argv)
    micro_batches = arguments.micro_batches

    without_timer_slack()
    with harness.on_this_machine() as machine:
        sizes = [each / 1e3 for each in sorted(arguments.milliseconds)]
        measured = {line: [measure(line, size, micro_batches, arguments.seconds) for size in sizes] for line in LINES}

    verdicts = report(measured, micro_batches)
    for path in {arguments.plot, PICTURE if arguments.save else None} - {None}:
        path.write_text(picture(measured, micro_batches), encoding="utf-8")
    content = {
        "micro_batches": micro_batches,
        "lines": {line.name: [vars(point) for point in points] for line, points in measured.items()},
    }
    harness.conclude("grain", arguments, machine, verdicts, content)


def curve(points: Sequence[Point], schedule: str) -> list[tuple[float, float]]:
    """Efficiency over the size of an action in milliseconds."""
    return [(1e3 * point.seconds, point.efficiency[schedule]) for point in points]


def picture(measured: dict[Line, list[Point]], micro_batches: int) -> str:
    """A panel for each schedule."""
    return draw(
        {
            schedule: [
                Curve(line.name, curve(points, schedule), 1 / line.speed_up(schedule, micro_batches))
                for line, points in measured.items()
            ]
            for schedule in SCHEDULES
        }
    )


def report(measured: dict[Line, list[Point]], micro_batches: int) -> list[Verdict]:
    """Prints both tables; returns the verdicts."""
    print(f"ideal step of the schedule over the measured one, for {micro_batches} micro-batches and actions of\n")
    rows = []
    for line, points in measured.items():
        for name in points[0].efficiency:
            shown = "threads without a pipe" if name == BARE else name
            rows.append([f"{line.name}, {shown}", *(f"{100 * point.efficiency[name]:.0f}%" for point in points)])
        if line.kernel.real:
            rows.append([f"{line.name}: an action alone", *(f"{1e3 * point.alone:.3g} ms" for point in points)])
        else:
            rows.append([f"{line.name}: real sleep", *(f"x {point.slept:.2f}" for point in points)])
    harness.print_table(["", *(f"{1e3 * point.seconds:g} ms" for point in measured[LINES[-1]])], rows)

    print(
        "\nmilliseconds of an action from which on a pipe is faster than one worker, and has 90% of its ideal speed\n"
    )
    rows, verdicts = [], []
    for line, points in measured.items():
        for schedule in SCHEDULES:
            speed_up = line.speed_up(schedule, micro_batches)
            pays, good = (crossing(curve(points, schedule), level) for level in (1 / speed_up, 0.9))
            least = 1e3 * points[0].seconds
            shown = [f"<= {least:.2g}" if each == least else f"{each:.2g}" for each in (pays, good)]
            rows.append([f"{line.name}, {schedule}", f"{speed_up:.2f} x", *shown])
            verdicts.append(Verdict(f"{line.name}, {schedule}: pays from actions of", pays, TARGET, "ms"))
    harness.print_table(["", "ideal speed-up", "pays from", "90% from"], rows)
    return verdicts


if __name__ == "__main__":
    main()
