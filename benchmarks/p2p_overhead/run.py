"""What does it cost that workers are processes?

Two gloo processes train two equal stages, with pipework and with torch.distributed.pipelining: the same model cut at
the same place, the same micro-batches, no checkpointing, no optimizer, one intra-op thread. Stages are tiny, so that
hardly anything is left but the overhead; small; and large, with megabytes to send. All candidates of a size live in the
same pair of processes and take turns. Then messages alone are sent to and fro.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.p2p_overhead import messages
from benchmarks.p2p_overhead.task import SIZES, Size, Task
from benchmarks.two_processes import Part, PipeworkPart, PyTorchPart, TwoProcesses, two_processes
from pipework import Mesh

SCHEDULES = ("gpipe", "1f1b")
OURS, THEIRS = "pipework", "torch.distributed.pipelining"
SECONDS_OF_A_TURN = 0.2  # short steps are run several times in a row


@dataclass(frozen=True)
class Times:
    """Of each candidate, one number a round.

    Attributes:
        seconds: of a run.
        processor: seconds of the cores, of both processes together.
        runs: in a turn.
    """

    seconds: dict[str, list[float]]
    processor: dict[str, list[float]] = field(default_factory=dict)
    runs: int = 1

    def ratio(self, ours: str, theirs: str) -> float:
        return harness.median_ratio(self.seconds[ours], self.seconds[theirs])

    def processor_ratio(self, ours: str, theirs: str) -> float:
        return harness.median_ratio(self.processor[ours], self.processor[theirs])


def parts_of(task: Task, mesh: Mesh) -> Mapping[str, Part]:
    """What one process does of each candidate."""
    result: dict[str, Part] = {}
    for schedule in SCHEDULES:
        result[f"{OURS} {schedule}"] = PipeworkPart(mesh, task, schedule)
        result[f"{THEIRS} {schedule}"] = PyTorchPart(mesh.worker, task, schedule)
    return result


def parts_of_messages(numbers: int, mesh: Mesh) -> Mapping[str, Part]:
    return messages.parts(mesh, numbers)


def measure(processes: TwoProcesses, names: list[str], rounds: int) -> Times:
    """Runs the candidates in turns."""
    once = min(processes.seconds(name) for name in names * 2)
    runs = max(1, min(50, int(SECONDS_OF_A_TURN / once))) if rounds > 1 else 1
    processor: dict[str, list[float]] = {name: [] for name in names}

    def turn(name: str) -> float:
        taken = processes.take(name, runs)
        processor[name].append(taken.processor)
        return taken.seconds

    seconds = harness.alternate({name: partial(turn, name) for name in names}, rounds, warm_up=1)
    return Times(seconds, {name: values[1:] for name, values in processor.items()}, runs)


def check(processes: TwoProcesses, names: list[str]) -> None:
    """All candidates must compute the same gradients."""
    expected = None
    for name in names:
        processes.seconds(name)
        gradients = processes.gradients(name)
        expected = expected or gradients
        harness.check_gradients(name, gradients, expected)


def train(size: Size, chunks: int, rounds: int) -> Times:
    """Steps of all candidates for one size."""
    names = [f"{who} {schedule}" for schedule in SCHEDULES for who in (OURS, THEIRS)]
    with two_processes(partial(parts_of, Task(size, chunks))) as processes:
        check(processes, names)
        return measure(processes, names, rounds)


def send(size: Size, rounds: int) -> Times:
    """Messages of that size."""
    names = [messages.CHANNEL, messages.ISEND, messages.BATCHED]
    with two_processes(partial(parts_of_messages, size.sent_bytes // 4)) as processes:
        return measure(processes, names, rounds)


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 15, 3, "how often each candidate runs")
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="of stages (default all)")
    options.add_argument("--chunks", type=int, nargs="+", default=[8, 32], help="micro-batches (default 8 32)")
    arguments = options.parse_args(argv)
    rounds = arguments.rounds
    trained: dict[tuple[str, int], Times] = {}
    sent: dict[str, Times] = {}
    with harness.on_this_machine() as machine:
        for name in arguments.sizes:
            for chunks in arguments.chunks:
                print(f"training: {name}, {chunks} micro-batches", file=sys.stderr, flush=True)
                trained[name, chunks] = train(SIZES[name], chunks, rounds)
            print(f"messages: {name}", file=sys.stderr, flush=True)
            sent[name] = send(SIZES[name], rounds)
    verdicts = report(trained, rounds)
    report_messages(sent)
    results = {
        "rounds": rounds,
        "sizes": {name: vars(SIZES[name]) for name in arguments.sizes},
        "steps": [{"size": name, "micro_batches": m, **vars(times)} for (name, m), times in trained.items()],
        "messages": {"round_trips": messages.ROUND_TRIPS, **{name: vars(times) for name, times in sent.items()}},
    }
    harness.conclude("p2p_overhead", arguments, machine, verdicts, results)


def report(trained: Mapping[tuple[str, int], Times], rounds: int) -> list[Verdict]:
    """Prints the table of steps; returns the verdicts."""
    for name in dict.fromkeys(name for name, _ in trained):
        print(f"{name}: two stages, each {SIZES[name]} for each micro-batch")
    print(
        f"\nmilliseconds of a step and of the cores for it, medians of {rounds} rounds in turns; ratios to PyTorch's\n"
    )
    rows, verdicts = [], []
    for (name, chunks), times in trained.items():
        for schedule in SCHEDULES:
            ours, theirs = f"{OURS} {schedule}", f"{THEIRS} {schedule}"
            ratio, processor = times.ratio(ours, theirs), times.processor_ratio(ours, theirs)
            ratios = [a / b for a, b in zip(times.seconds[ours], times.seconds[theirs], strict=True)]
            rows.append(
                [
                    f"{name}, {schedule}",
                    str(chunks),
                    *(f"{1e3 * median(times.seconds[who]):.3g}" for who in (ours, theirs)),
                    f"{ratio:.2f}",
                    harness.middle_half(ratios, digits=2),
                    f"{min(times.seconds[ours]) / min(times.seconds[theirs]):.2f}",
                    *(f"{1e3 * median(times.processor[who]):.3g}" for who in (ours, theirs)),
                    f"{processor:.2f}",
                ]
            )
            what = f"{name}, {chunks} micro-batches, {schedule}: pipework to PyTorch"
            verdicts.append(Verdict(what, ratio, 1.0, "x"))
    header = ["", "micro-batches", "pipework", "PyTorch", "ratio", "middle half", "fastest runs"]
    harness.print_table([*header, "cores: pipework", "PyTorch", "ratio"], rows)
    return verdicts


def report_messages(sent: Mapping[str, Times]) -> None:
    """Prints what a message costs whose form is that of the one before."""
    print(f"\nmicroseconds of a message, to and fro {messages.ROUND_TRIPS} times; below, of the cores\n")
    names = [messages.CHANNEL, messages.ISEND, messages.BATCHED]
    rows = []
    for name, times in sent.items():
        label = f"{SIZES[name].sent_bytes / 1024:.3g} KiB"
        for what, values in ((label, times.seconds), (f"{label}, cores", times.processor)):
            rows.append([what, *(f"{1e6 * median(values[who]) / (2 * messages.ROUND_TRIPS):.1f}" for who in names)])
    harness.print_table(["", *names], rows)


if __name__ == "__main__":
    main()
