"""Does a pipe of many workers take the time that its schedule predicts?

Layers that sleep instead of computing, forward and backward, so that two cores stand for sixteen devices. The real
runtime runs the schedule; the simulation predicts its makespan from the times that the layers were asked to sleep. What
is left is what the runtime, its threads and Python cost.

A sleep wakes up late: on Linux by 60 to 100 microseconds, of which 50 are slack that the kernel gives itself to bundle
timers. The slack is turned off (prctl), and each sleep is asked to end earlier by what is left, measured before with as
many threads. The times that the layers really slept are measured, too, and printed: they must be what was asked, on the
average.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from a checkout as it is

from benchmarks.measure import Verdict, alternate, conclude, on_this_machine, parser, print_table, timed
from pipework.pipe import Pipe
from pipework.schedule import Costs

TOLERANCE = 3.0  # percent
MICRO_BATCHES = 32


def without_timer_slack() -> None:
    """Threads started from now on sleep precisely, if this is Linux."""
    if sys.platform == "linux":
        set_timer_slack = 29  # PR_SET_TIMERSLACK of linux/prctl.h; the argument is in nanoseconds
        ctypes.CDLL(None).prctl(set_timer_slack, 1, 0, 0, 0)


@dataclass
class Alarm:
    """Sleeps as long as asked, and keeps how long it was.

    Attributes:
        lateness: how much later a sleep ends than asked, on the average; subtracted from every one.
        slept: for each sleep (asked, real) seconds.
    """

    lateness: float = 0.0
    slept: list[tuple[float, float]] = field(default_factory=list)

    def sleep(self, seconds: float, start: float | None = None) -> None:
        """Sleeps until `seconds` after `start`, which is when the layer began its work."""
        if seconds <= 0:
            return
        start = time.perf_counter() if start is None else start
        time.sleep(max(0.0, start + seconds - time.perf_counter() - self.lateness))
        self.slept.append((seconds, time.perf_counter() - start))

    def calibrate(self, threads: int, seconds: float, repetitions: int = 40) -> None:
        """Measures the lateness while this many threads sleep, not all in step."""
        self.lateness = 0.0

        def sleep_often(number: int) -> None:
            time.sleep(seconds * number / threads)
            for _ in range(repetitions):
                self.sleep(seconds)

        sleepers = [threading.Thread(target=sleep_often, args=(number,)) for number in range(threads)]
        for sleeper in sleepers:
            sleeper.start()
        for sleeper in sleepers:
            sleeper.join()
        late = sorted(real - asked for asked, real in self.slept)
        # A mean, since it is sums that count; without the latest, which other processes have caused.
        self.lateness = mean(late[: len(late) * 95 // 100])
        self.slept.clear()


class Nap(torch.autograd.Function):
    """Identity that takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alarm: Alarm, forward: float, backward: float, start: float) -> Tensor:
        ctx.alarm, ctx.seconds = alarm, backward
        alarm.sleep(forward, start)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.alarm.sleep(ctx.seconds)
        return gradient, None, None, None, None


class Sleeper(nn.Module):
    """A layer that computes nothing, slowly."""

    def __init__(self, alarm: Alarm, forward: float, backward: float) -> None:
        super().__init__()
        self.alarm = alarm
        self.seconds = (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(x, self.alarm, *self.seconds, time.perf_counter())  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """How long each stage sleeps."""

    name: str
    forward: Sequence[float]
    backward: Sequence[float]

    @property
    def workers(self) -> int:
        return len(self.forward)


@dataclass
class Result:
    """One case, in seconds.

    Attributes:
        predicted: the simulated makespan.
        recorded: the makespans of the recorded timelines.
        wall: forward and backward as the caller sees them, not recorded.
        awake: the same when no layer sleeps: the host's work alone.
        slept: the mean real sleep over the mean asked one.
        action: the mean recorded action over the mean asked sleep.
        explained: the makespans simulated from the recorded times of the actions.
    """

    predicted: float
    recorded: list[float]
    wall: list[float]
    awake: list[float]
    slept: float
    action: float
    explained: list[float]


def training(case: Case, alarm: Alarm, micro_batches: int, *, asleep: bool = True) -> tuple[Pipe, Callable[[], None]]:
    """A pipe of one sleeping layer for each worker, and what runs one mini-batch."""
    layers = [
        Sleeper(alarm, *((forward, backward) if asleep else (0.0, 0.0)))
        for forward, backward in zip(case.forward, case.backward, strict=True)
    ]
    workers = case.workers
    pipe = Pipe(nn.Sequential(*layers), micro_batches, "never", balance=[1] * workers, devices=["cpu"] * workers)
    batch = torch.zeros(micro_batches, 1, requires_grad=True)
    gradient = torch.ones(micro_batches, 1)

    def run() -> None:
        pipe(batch).backward(gradient)

    return pipe, run


def measure(case: Case, micro_batches: int, rounds: int) -> Result:
    alarm = Alarm()
    alarm.calibrate(case.workers, min(case.forward))
    pipe, asleep = training(case, alarm, micro_batches)
    _, awake = training(case, alarm, micro_batches, asleep=False)
    recorded, actions, explained = [], [], []

    def record() -> None:
        with pipe.record() as recording:
            asleep()
        timeline = recording.timeline()
        recorded.append(timeline.makespan)
        explained.append(recording.predicted().makespan)
        actions.append(mean(interval.end - interval.start for interval in timeline.intervals))

    seconds = alternate({"asleep": timed(asleep), "awake": timed(awake), "record": timed(record)}, rounds, warm_up=1)
    costs = Costs(forward=case.forward, backward=case.backward)
    predicted = pipe.schedule(micro_batches).simulate(costs, loss_outside=True).makespan
    asked, real = (mean(column) for column in zip(*alarm.slept, strict=True))
    return Result(
        predicted=predicted,
        recorded=recorded[-rounds:],
        wall=seconds["asleep"],
        awake=seconds["awake"],
        slept=real / asked,
        action=median(actions[-rounds:]) / asked,
        explained=explained[-rounds:],
    )


def cases(workers: Sequence[int], milliseconds: float) -> list[Case]:
    """Equal stages, and four unequal ones with slower backwards, where the slowest is in the middle."""
    seconds = milliseconds / 1e3
    equal = [Case(f"{count}", [seconds] * count, [seconds] * count) for count in workers]
    factors = (1.0, 1.4, 2.0, 1.2)
    unequal = Case("4, unequal", [seconds * each for each in factors], [2 * seconds * each for each in factors])
    return [*equal, unequal]


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="how often each is run (default 9; with --quick 3)")
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 12, 16], help="(default 2 4 8 12 16)")
    options.add_argument("--milliseconds", type=float, default=5.0, help="that an action sleeps (default 5)")
    options.add_argument("--micro-batches", type=int, default=MICRO_BATCHES, help=f"(default {MICRO_BATCHES})")
    arguments = options.parse_args(argv)
    rounds = arguments.rounds or (3 if arguments.quick else 9)

    without_timer_slack()
    with on_this_machine() as machine:
        to_do = cases(arguments.workers, arguments.milliseconds)
        results = {case.name: measure(case, arguments.micro_batches, rounds) for case in to_do}

    verdicts = report(results, arguments.micro_batches, arguments.milliseconds)
    content = {
        "micro_batches": arguments.micro_batches,
        "milliseconds": arguments.milliseconds,
        "cases": {name: vars(result) for name, result in results.items()},
    }
    conclude("many_workers", arguments, machine, verdicts, content)


def report(results: dict[str, Result], micro_batches: int, milliseconds: float) -> list[Verdict]:
    """Prints the table; returns what was to be reached."""
    print(f"{micro_batches} micro-batches, {milliseconds:g} ms forward and backward on each stage; medians in ms\n")
    rows, verdicts = [], []
    for name, result in results.items():
        excess = {
            "recorded": 100 * (median(result.recorded) / result.predicted - 1),
            "wall-clock": 100 * (median(result.wall) / result.predicted - 1),
        }
        rows.append(
            [
                name,
                f"{result.predicted * 1e3:.1f}",
                f"{median(result.recorded) * 1e3:.1f}",
                f"{excess['recorded']:+.2f} %",
                f"{100 * (median(result.explained) / result.predicted - 1):+.2f} %",
                f"{median(result.wall) * 1e3:.1f}",
                f"{excess['wall-clock']:+.2f} %",
                f"{median(result.awake) * 1e3:.1f}",
                f"{100 * (result.slept - 1):+.2f} %",
                f"{100 * (result.action - 1):+.2f} %",
            ]
        )
        for clock, above in excess.items():
            verdicts.append(Verdict(f"workers: {name}: {clock} above simulated makespan", above, TOLERANCE, "%"))
    header = ["workers", "simulated", "recorded", "", "explained", "wall-clock", "", "awake", "real sleep", "action"]
    print_table(header, rows)
    return verdicts


if __name__ == "__main__":
    main()
