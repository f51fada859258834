"""How fast is a two-stage pipeline on two cores?

A transformer of 8 equal blocks trains for one mini-batch of 8 micro-batches: forward, loss, backward. Un-pipelined on
one core, it takes T. Two workers with half the blocks each need 9 slots of T/16 in fill-drain and 1F1B, since each of
them waits for one slot: 9/16 T is the ideal. With two stages for each worker they wait half as long: 17/32 T. All
libraries and schedules take turns in one run.

Then the same pipes are recorded, and the measured steps compared with what the simulation predicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.schedules import TRAINING
from benchmarks.two_processes import WORKERS, TwoProcesses, two_processes
from benchmarks.two_stage_speed import predictions, ranks
from benchmarks.two_stage_speed.measured_costs import HALVES, WHOLE_BACKWARDS, MeasuredCosts
from benchmarks.two_stage_speed.ranks import PIPELINING
from benchmarks.two_stage_speed.task import Task
from pipework.pipe import Pipe

ONE_CORE = "un-pipelined, one core, micro-batch by micro-batch"
WHOLE = "un-pipelined, one core, the whole batch at once"
ALL_CORES = "un-pipelined, all cores, the whole batch at once"
OUTSIDE = "pipework gpipe, loss outside"
TORCHGPIPE = "torchgpipe 0.0.7"
BEST_TARGET = 0.52  # of the one-core time: within 4% of a perfect split, for the best schedule that splits backwards


@dataclass(frozen=True)
class Variant:
    """A candidate: a model that trains in some way.

    Attributes:
        step: times forward, loss and backward, with cleared gradients.
        gradients: what the last step left.
        schedule: what it runs; None: it is no pipeline.
    """

    step: harness.Candidate
    gradients: Callable[[], list[Tensor]]
    schedule: str | None = None


def variant(model: nn.Module, run: Callable[[], object], schedule: str | None = None) -> Variant:
    """A variant in this process."""
    return Variant(harness.timed(run, before=model.zero_grad), lambda: harness.gradients_of(model), schedule)


def unpipelined(task: Task, *, micro_batched: bool, cores: int = 1) -> Variant:
    """The model as it is, on the calling thread and the threads of its operators."""
    model = task.model()
    pieces = list(zip(*(each.chunk(task.chunks if micro_batched else 1) for each in task.batch()), strict=True))

    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(cores)
        for piece, target in pieces:
            (task.loss_of(model(piece), target) / len(pieces)).backward()
        torch.set_num_threads(before)

    return variant(model, run)


def outside_loss(task: Task, model: nn.Module) -> Variant:
    """A pipeline in this process that gives its outputs to a loss outside."""
    batch, target = task.batch()
    return variant(model, lambda: task.loss_of(model(batch), target).backward(), "gpipe")


def inside_loss(task: Task, pipe: Pipe, schedule: str) -> Variant:
    """A pipe that computes the loss itself."""
    batch, target = task.batch()
    return variant(pipe, lambda: pipe(batch, target=target).backward(), schedule)


def pipe_of(task: Task, schedule: str, *, inside: bool = True) -> Pipe:
    return Pipe(
        task.model(),
        task.chunks,
        "never",
        balance=task.balance(schedule),
        devices=["cpu"] * WORKERS,
        schedule=schedule,
        loss_fn=task.loss_of if inside else None,
    )


def torchgpipe_model(task: Task) -> nn.Module | None:
    """The model in torchgpipe; None where that is not installed."""
    library = harness.old_library("torchgpipe", "0.0.7")
    if library is None:
        return None
    model, balance = task.model(), task.balance("gpipe")
    pipe: nn.Module = library.GPipe(model, balance, devices=["cpu"] * WORKERS, chunks=task.chunks, checkpoint="never")
    return pipe


def all_variants(task: Task, processes: TwoProcesses, pipes: dict[str, Pipe]) -> dict[str, Variant]:
    """All variants, related ones next to each other."""
    variants = {
        ONE_CORE: unpipelined(task, micro_batched=True),
        WHOLE: unpipelined(task, micro_batched=False),
        ALL_CORES: unpipelined(task, micro_batched=False, cores=WORKERS),
        OUTSIDE: outside_loss(task, pipes[OUTSIDE]),
    }
    for schedule in TRAINING:
        name = f"pipework {schedule}"
        variants[name] = inside_loss(task, pipes[name], schedule)
    other = torchgpipe_model(task)
    if other is not None:
        variants[TORCHGPIPE] = outside_loss(task, other)
    for name, schedule in {**ranks.NAMES, **ranks.RIVALS}.items():
        variants[name] = Variant(partial(processes.seconds, name), partial(processes.gradients, name), schedule)
    return variants


def check(variants: dict[str, Variant]) -> None:
    """All candidates must compute the same gradients."""
    variants[ONE_CORE].step()
    expected = variants[ONE_CORE].gradients()
    for name, each in variants.items():
        each.step()
        harness.check_gradients(name, each.gradients(), expected)


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 9, 3, "how often each candidate runs")
    options.add_amount("--recorded", 5, 3, "steps of each pipe to record")
    options.add_argument("--predict", type=float, default=0.5, help="seconds of pipe.predict() a stage (default 0.5)")
    options.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    options.add_argument("--tokens", type=int, default=128, help="of a row (default 128)")
    options.add_argument("--chunks", type=int, default=8, help="micro-batches (default 8)")
    arguments = options.parse_args(argv)
    rounds, recorded = arguments.rounds, arguments.recorded
    task = Task(width=arguments.width, tokens=arguments.tokens, chunks=arguments.chunks)

    with harness.on_this_machine() as machine, two_processes(partial(ranks.parts, task)) as processes:
        pipes = {
            OUTSIDE: pipe_of(task, "gpipe", inside=False),
            **{f"pipework {schedule}": pipe_of(task, schedule) for schedule in TRAINING},
        }
        variants = all_variants(task, processes, pipes)
        check(variants)
        costs = {"alone": MeasuredCosts(task, beside=0), "both busy": MeasuredCosts(task, beside=1)}
        candidates: dict[str, harness.Candidate] = {name: each.step for name, each in variants.items()}
        for each in costs.values():
            candidates |= each.candidates
        seconds = harness.alternate(candidates, rounds, warm_up=1)
        seconds = {name: seconds[name] for name in variants}
        forecasts = predictions.forecast(
            {name: subject(task, name, pipe, variants[name], arguments.predict) for name, pipe in pipes.items()},
            recorded,
        )

    schedules = {name: each.schedule for name, each in variants.items()}
    report(seconds, schedules, task, rounds)
    measured = report_measured(seconds, schedules, task, costs, rounds)
    verdicts = [*verdicts_of(seconds, schedules, task), *measured, *predictions.report(forecasts, recorded)]
    results = {
        "task": vars(task),
        "rounds": rounds,
        "seconds": seconds,
        "costs": {
            f"{name}, {schedule}": vars(each.of(schedule, rounds))
            for name, each in costs.items()
            for schedule in (WHOLE_BACKWARDS, HALVES)
        },
        "predictions": {name: vars(each) for name, each in forecasts.items()},
    }
    harness.conclude("two_stage_speed", arguments, machine, verdicts, results)


def subject(task: Task, name: str, pipe: Pipe, one: Variant, timeout: float) -> predictions.Subject:
    """A pipe whose steps are to be predicted."""
    batch, target = task.batch()
    inside = None if name == OUTSIDE else target
    return predictions.Subject(pipe, one.step, lambda: pipe.predict(batch, target=inside, timeout=timeout).seconds)


def report(seconds: dict[str, list[float]], schedules: dict[str, str | None], task: Task, rounds: int) -> None:
    """The table of speeds."""
    print(
        f"{task.blocks} blocks of width {task.width}, {task.tokens} tokens, {task.chunks} micro-batches of {task.rows} "
        f"rows, no checkpointing, one intra-op thread each;\n"
        f"seconds for forward, loss and backward: medians of {rounds} rounds in turns\n"
    )
    rows = []
    for name, times in seconds.items():
        share = harness.median_ratio(times, seconds[ONE_CORE])
        fastest = min(times) / min(seconds[ONE_CORE])
        schedule = schedules[name]
        ideal = None if schedule is None else task.ideal(schedule)
        rows.append(
            [
                name,
                f"{median(times):.3f}",
                harness.middle_half(times),
                f"{share:.3f}",
                *(
                    ["", "", ""]
                    if ideal is None
                    else [f"{ideal:.3f}", f"{share / ideal:.3f}", f"{fastest / ideal:.3f}"]
                ),
            ]
        )
    harness.print_table(["", "seconds", "middle half", "of one core", "ideal", "of the ideal", "fastest runs"], rows)


def report_measured(
    seconds: dict[str, list[float]],
    schedules: dict[str, str | None],
    task: Task,
    costs: dict[str, MeasuredCosts],
    rounds: int,
) -> list[Verdict]:
    """The table of steps beside the ideals of measured costs; returns the verdicts."""
    print("\nmilliseconds of F, B, I and W of the whole model and one micro-batch, medians\n")
    harness.print_table(
        ["", "F", "B", "F, split", "I", "W"],
        [[name, *(f"{1e3 * value:.1f}" for value in each.of_model(rounds))] for name, each in costs.items()],
    )
    print("\nideal steps with these costs, in seconds, and measured ones to them: medians, and fastest runs\n")
    rows, verdicts = [], []
    for name, times in seconds.items():
        schedule = schedules[name]
        if schedule is None or not name.startswith("pipework"):
            continue
        row = [name]
        for which, each in costs.items():
            ideal = task.ideal(schedule, each.of(schedule, rounds))
            fastest = task.ideal(schedule, each.of(schedule, rounds, fastest=True))
            to_ideal, to_fastest = median(times) / ideal, min(times) / fastest
            row += [f"{ideal:.3f}", f"{to_ideal:.3f}", f"{to_fastest:.3f}"]
            for what, value in (("medians", to_ideal), ("fastest runs", to_fastest)):
                verdicts.append(Verdict(f"{name} to its ideal, costs measured {which}, {what}", value, 1.05, "x"))
        rows.append(row)
    harness.print_table(["", *(f"{which}{what}" for which in costs for what in (": ideal", "", ", fastest"))], rows)
    return verdicts


def verdicts_of(seconds: dict[str, list[float]], schedules: dict[str, str | None], task: Task) -> list[Verdict]:
    """The targets: near the ideal, faster than one core and than other libraries with the same schedule."""
    verdicts = []
    for name, times in seconds.items():
        schedule = schedules[name]
        if schedule is None or not name.startswith("pipework"):
            continue
        for rival in (ONE_CORE, TORCHGPIPE, f"{PIPELINING} {schedule}"):
            if rival in seconds:
                verdicts.append(Verdict(f"{name} to {rival}", harness.median_ratio(times, seconds[rival]), 1.0, "x"))
    return [*verdicts, *verdicts_of_the_best(seconds, task)]


def verdicts_of_the_best(seconds: dict[str, list[float]], task: Task) -> list[Verdict]:
    """How near the best schedule that splits backwards is to half the one-core time, and to all of the others."""
    split = [f"pipework {name}" for name in TRAINING if task.splits(name)]
    best = min(split, key=lambda name: harness.median_ratio(seconds[name], seconds[ONE_CORE]))
    rivals = [name for name in seconds if name.startswith(PIPELINING)]
    return [
        Verdict(
            f"the best, {best}, as a share of one core",
            harness.median_ratio(seconds[best], seconds[ONE_CORE]),
            BEST_TARGET,
            "x",
        ),
        *(
            Verdict(f"the best, {best}, to {name}", harness.median_ratio(seconds[best], seconds[name]), 1.0, "x")
            for name in rivals
        ),
    ]


if __name__ == "__main__":
    main()
