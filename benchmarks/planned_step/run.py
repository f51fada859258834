"""Does a planned step take the time and the memory that the plan says, and is no schedule with a name faster?

Five models on two CPU workers. A pipe of the plan takes turns with pipes of the four schedules that are the fastest in
the simulation, each with the balance that was measured for it. Steps of the plan are timed again between them, on
copies as the planner does it: over minutes, other work on a machine changes how fast it is, and then a prediction of
earlier is not one of now.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import pipework.planning
from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.planned_step.models import TASKS, Task
from pipework import Pipe, Plan
from pipework.planning.measuring.plan_model import by_speed
from pipework.planning.measuring.sample_batch import SampleBatch

DEVICES = ("cpu", "cpu")
NAMED = 4
IN_A_ROW = 3  # steps that a pipe is measured for, when it is its turn
TARGET = 5.0  # percent


@dataclass(frozen=True)
class Result:
    """A plan, measured.

    Attributes:
        plan: what it says.
        predicted: its step, each time that its actions were measured again.
        seconds: of its steps, the median of each turn.
        others: those of the best schedules with a name.
        held: the most that each worker's activations held, and what was predicted.
    """

    plan: Plan
    predicted: list[float]
    seconds: list[float]
    others: dict[str, list[float]]
    held: list[tuple[float, float]]


def measure(task: Task, rounds: int, search: float, timeout: float) -> Result:
    """Plan, train, and compare."""
    x, y = task.batch()
    options: dict[str, Any] = {"target": y, "loss_fn": task.loss, "devices": DEVICES, "timeout": timeout}
    quiet: dict[str, Any] = {"progress": lambda line: None}
    module = task.module()
    profile = pipework.planning.profile(module, x, **options, **quiet)
    plan = pipework.plan(module, x, **options, **quiet, seconds=search)
    pipes = {"plan": Pipe(task.module(), plan=plan, loss_fn=task.loss)}
    names = sorted(plan.named, key=plan.named.__getitem__)[:NAMED]
    for name in names:
        best = pipework.plan(profile, devices=DEVICES, schedules=[name], seconds=search / NAMED, **quiet)
        pipes[name] = Pipe(task.module(), plan=best, loss_fn=task.loss)

    def step(pipe: Pipe) -> None:
        pipe(x, target=y).backward()

    def turn(pipe: Pipe) -> float:
        """The median of some steps in a row, as a training makes them: the first finds the caches of another pipe."""
        one = harness.timed(lambda: step(pipe), before=pipe.zero_grad)
        return median([one() for _ in range(1 + IN_A_ROW)][1:])

    candidates = {name: functools.partial(turn, pipe) for name, pipe in pipes.items()}
    predicted: list[float] = []
    batch = SampleBatch.of(module, x, None, y, task.loss)

    def predict() -> None:
        (again,) = by_speed([plan], module, batch, timeout / 4, lambda line: None)
        predicted.append(again.seconds)

    times = harness.alternate(candidates | {"prediction": harness.timed(predict)}, rounds)
    del times["prediction"]
    with pipes["plan"].record() as recording:
        step(pipes["plan"])
    line = recording.timeline()
    held = [(line.peak_memory(worker), each.activations) for worker, each in enumerate(plan.workers)]
    return Result(plan, predicted, times.pop("plan"), times, held)


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 12, 3, "turns of each pipe")
    options.add_amount("--search", 20.0, 0.5, "seconds to search for a plan")
    options.add_amount("--timeout", 0.5, 0.0, "seconds to measure each layer")
    options.add_argument("--only", choices=list(TASKS), help="one model")
    arguments = options.parse_args(argv)
    torch.set_num_threads(len(DEVICES))  # one for each worker
    results = {}
    with harness.on_this_machine(threads=len(DEVICES)) as machine:
        for name, task in TASKS.items():
            if arguments.only in (None, name):
                results[name] = measure(task, arguments.rounds, arguments.search, arguments.timeout)
    rows, verdicts = [], []
    for name, each in results.items():
        step, said = median(each.seconds), median(each.predicted)
        best = min(each.others, key=lambda other: median(each.others[other]), default="")
        ratio = harness.median_ratio(each.seconds, each.others[best]) if best else 1.0
        memory = max((harness.factor(got, predicted) for got, predicted in each.held if predicted), default=1.0)
        rows.append(
            [
                name, f"{each.plan.schedule.name}, {each.plan.chunks}", f"{1e3 * each.plan.seconds:.1f} ms",
                f"{1e3 * said:.1f} ms", f"{1e3 * step:.1f} ms",
                f"{1e3 * min(each.seconds):.1f} ms", f"{100 * (said / step - 1):+.1f}%", f"{best}: {ratio:.3f}",
                f"{100 * (memory - 1):.1f}%",
            ]
        )  # fmt: skip
        verdicts += [
            Verdict(f"{name}, predicted beside measured", 100 * (harness.factor(said, step) - 1), TARGET, "%"),
            Verdict(f"{name}, beside the best schedule with a name", ratio, 1.03, "of its time"),
            Verdict(f"{name}, activations predicted beside counted", 100 * (memory - 1), TARGET, "%"),
        ]
    columns = [
        "model",
        "plan",
        "planned",
        "predicted again",
        "median",
        "fastest",
        "error",
        "beside the best name",
        "memory, error",
    ]
    harness.print_table(columns, rows)
    raw = {
        name: {
            "seconds": each.seconds,
            "others": each.others,
            "planned": each.plan.seconds,
            "predicted": each.predicted,
            "held": each.held,
        }
        for name, each in results.items()
    }
    harness.conclude("planned_step", arguments, machine, verdicts, {"models": raw})


if __name__ == "__main__":
    main()
