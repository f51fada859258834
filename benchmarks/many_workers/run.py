"""Does a pipe of many workers take the time that its schedule predicts?

Layers that sleep instead of computing, forward and backward, so that two cores stand for sixteen devices. The real
runtime runs every schedule; the simulation predicts its makespan from the times that the layers were asked to sleep.
What is left is what the runtime, its threads and Python cost. From the recorded costs the simulation predicts it again,
with and without the time that a value needs from worker to worker. Beside schedules that split no backwards runs a bare
pipeline of threads, which does nothing that it need not do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.many_workers import bare
from benchmarks.schedules import TRAINING
from benchmarks.sleeping import Alarm, Sleeper, sleeping_in_halves, without_timer_slack
from pipework.pipe import Pipe
from pipework.schedule import Costs, schedule_spec, simulate

TOLERANCE = 3.0  # percent
MICRO_BATCHES = 32


def loss_of(output: Tensor, _: Tensor) -> Tensor:
    """Next to nothing."""
    return output.mean()


@dataclass(frozen=True)
class Case:
    """A pipe, and how long each of its stages sleeps."""

    schedule: str
    workers: int
    forward: Sequence[float]
    backward: Sequence[float]
    inside: bool = True

    @property
    def label(self) -> str:
        return self.schedule if self.inside else f"{self.schedule}, loss outside"

    @property
    def name(self) -> str:
        return self.label if len(set(self.forward)) == 1 else f"{self.label}, unequal"

    @property
    def costs(self) -> Costs:
        return Costs(forward=self.forward, backward=self.backward)


@dataclass
class Result:
    """One case, in seconds.

    Attributes:
        predicted: the simulated makespan.
        recorded: the makespans of the recorded timelines.
        wall: forward and backward as the caller sees them, not recorded.
        awake: the same when no layer sleeps: the host's work alone.
        bare: the wall-clock time of a bare pipeline of threads; None: it has no such schedule.
        slept: the mean real sleep over the mean asked one.
        action: the mean recorded action over the mean asked sleep.
        from_costs: the makespan simulated from the recorded costs.
        without_transfer: the same as if values needed no time from worker to worker.
    """

    predicted: float
    recorded: list[float]
    wall: list[float]
    awake: list[float]
    bare: list[float] | None
    slept: float
    action: float
    from_costs: float
    without_transfer: float


def sleepers(case: Case, alarm: Alarm, *, asleep: bool = True) -> list[Sleeper]:
    """A layer for each stage."""
    return [
        Sleeper(alarm, *((forward, backward) if asleep else (0.0, 0.0)), weight_share=0.5)
        for forward, backward in zip(case.forward, case.backward, strict=True)
    ]


def training(case: Case, alarm: Alarm, micro_batches: int, *, asleep: bool = True) -> tuple[Pipe, Callable[[], None]]:
    """A pipe of one sleeping layer for each stage, and what runs one mini-batch."""
    layers = sleepers(case, alarm, asleep=asleep)
    pipe = Pipe(
        nn.Sequential(*layers),
        micro_batches,
        "never",
        balance=[1] * len(layers),
        devices=["cpu"] * case.workers,
        schedule=case.schedule,
        loss_fn=loss_of if case.inside else None,
    )
    batch = torch.zeros(micro_batches, 1, requires_grad=True)
    target = torch.ones(micro_batches, 1)

    def inside() -> None:
        pipe(batch, target=target).backward()

    def outside() -> None:
        pipe(batch).backward(target)

    return pipe, inside if case.inside else outside


def measure(case: Case, micro_batches: int, rounds: int) -> Result:
    alarm = Alarm()
    alarm.calibrate(case.workers, min(case.forward))
    recorded_pipe, recorded = training(case, alarm, micro_batches)
    _, asleep = training(case, alarm, micro_batches)
    _, awake = training(case, alarm, micro_batches, asleep=False)
    schedule, outside = recorded_pipe.schedule(micro_batches), not case.inside
    turns = {"recorded": harness.timed(recorded), "asleep": harness.timed(asleep), "awake": harness.timed(awake)}
    if case.inside and schedule.kinds <= {"F", "B"}:
        inputs = [torch.zeros(1, 1, requires_grad=True) for _ in range(micro_batches)]
        turns["bare"] = harness.timed(bare.step_of(schedule, sleepers(case, Alarm(alarm.lateness)), inputs))
    harness.alternate(turns, rounds=1, warm_up=0)  # the first steps do not count
    alarm.slept.clear()
    with recorded_pipe.record() as recording:
        seconds = harness.alternate(turns, rounds, warm_up=0)

    lines = [recording.timeline(step) for step in recording.steps]
    actions = [mean(interval.end - interval.start for interval in line.intervals) for line in lines]
    asked, real = (mean(column) for column in zip(*alarm.slept, strict=True))
    costs = replace(recording.costs(), transfer=0.0)
    return Result(
        predicted=simulate(schedule, case.costs, loss_outside=outside).makespan,
        recorded=[line.makespan for line in lines],
        wall=seconds["asleep"],
        awake=seconds["awake"],
        bare=seconds.get("bare"),
        slept=real / asked,
        action=median(actions) / asked,
        from_costs=recording.predicted().makespan,
        without_transfer=simulate(schedule, costs, loss_outside=outside).makespan,
    )


def cases(schedules: Sequence[str], workers: Sequence[int], milliseconds: float) -> list[Case]:
    """Equal stages, and four unequal ones, where the slowest is in the middle; backwards take twice as long."""
    seconds = milliseconds / 1e3
    factors = (1.0, 1.4, 2.0, 1.2)
    result = []
    for schedule, inside in [
        *([("gpipe", False)] if "gpipe" in schedules else []),
        *((each, True) for each in schedules),
    ]:
        for count in workers:
            each = [seconds] * count * schedule_spec(schedule).stages_per_worker
            result.append(Case(schedule, count, each, [2 * seconds for _ in each], inside))
        unequal = [seconds * each for each in factors * schedule_spec(schedule).stages_per_worker]
        result.append(Case(schedule, len(factors), unequal, [2 * each for each in unequal], inside))
    return result


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 3, 2, "how often each is run")
    options.add_argument("--schedules", nargs="+", default=TRAINING, help="(default all that train)")
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16], help="(default 2 4 8 16)")
    options.add_argument("--milliseconds", type=float, default=5.0, help="that a forward sleeps (default 5)")
    options.add_argument("--micro-batches", type=int, default=MICRO_BATCHES, help=f"(default {MICRO_BATCHES})")
    arguments = options.parse_args(argv)

    without_timer_slack()
    with harness.on_this_machine() as machine, sleeping_in_halves():
        to_do = cases(arguments.schedules, arguments.workers, arguments.milliseconds)
        results = [(case, measure(case, arguments.micro_batches, arguments.rounds)) for case in to_do]

    verdicts = report(results, arguments.micro_batches, arguments.milliseconds)
    content = {
        "micro_batches": arguments.micro_batches,
        "milliseconds": arguments.milliseconds,
        "cases": [{"name": case.name, **vars(case), **vars(result)} for case, result in results],
    }
    harness.conclude("many_workers", arguments, machine, verdicts, content)


def report(results: Sequence[tuple[Case, Result]], micro_batches: int, milliseconds: float) -> list[Verdict]:
    """Prints the table; returns the verdicts."""
    print(
        f"{micro_batches} micro-batches, {milliseconds:g} ms for a forward and each half of a backward; medians in ms\n"
    )
    rows: list[list[str]] = []
    most: dict[tuple[str, str], list[float]] = {}
    for case, result in results:
        recorded = median(result.recorded)
        excess = {
            "recorded": 100 * (recorded / result.predicted - 1),
            "wall-clock": 100 * (median(result.wall) / result.predicted - 1),
        }
        rows.append(
            [
                case.name,
                str(case.workers),
                f"{result.predicted * 1e3:.1f}",
                f"{recorded * 1e3:.1f}",
                f"{excess['recorded']:+.2f}%",
                f"{result.from_costs / recorded - 1:+.2%}",
                f"{result.without_transfer / recorded - 1:+.2%}",
                f"{median(result.wall) * 1e3:.1f}",
                f"{excess['wall-clock']:+.2f}%",
                "" if result.bare is None else f"{median(result.bare) / result.predicted - 1:+.2%}",
                f"{median(result.awake) * 1e3:.1f}",
                f"{result.slept - 1:+.2%}",
                f"{result.action - 1:+.2%}",
            ]
        )
        for clock, above in excess.items():
            most.setdefault((case.label, clock), []).append(above)
    header = ["schedule", "workers", "simulated", "recorded", "", "from costs", "without transfer"]
    harness.print_table([*header, "wall-clock", "", "bare threads", "awake", "real sleep", "action"], rows)
    return [
        Verdict(f"{label}, at most: {clock} above simulated makespan", max(above), TOLERANCE, "%")
        for (label, clock), above in most.items()
    ]


if __name__ == "__main__":
    main()
