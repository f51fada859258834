"""What do fully sharded stages cost, in bytes sent, in memory and in time?

Four gloo processes: two workers, two replicas. Replicas, ZeRO-1 and FSDP2 train the same model, FSDP2 with one stage
and with several for each worker, all of them whole or one at a time. Bytes sent and held are compared with formulas,
steps with those of torch.distributed.pipelining whose stages are sharded by FSDP2, in turns.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.sharding.task import REPLICAS, WORKERS, PyTorchSchedule, ShardedPipe, Task
from benchmarks.two_processes import Part, TwoProcesses, two_processes
from pipework import Mesh
from pipework.schedule import build, with_sharding

_STEPS = 5  # whose bytes are counted together: heartbeats go through the network, too


class Case(NamedTuple):
    """A way to train.

    Attributes:
        kind: "replicas", "zero-1" or "fsdp".
        schedule: its name.
        stages: of each worker.
        whole_stages: see `Pipe`.
        theirs: PyTorch's class of the same schedule; None: no rival.
    """

    kind: str
    schedule: str
    stages: int
    whole_stages: int | None = None
    theirs: str | None = None

    def __str__(self) -> str:
        whole = f", {self.whole_stages} whole" if self.whole_stages else ""
        return f"{self.kind}, {self.schedule}, {self.stages} per worker{whole}"


CASES = (
    Case("replicas", "1f1b", 1),
    Case("zero-1", "1f1b", 1),
    Case("fsdp", "1f1b", 1, theirs="Schedule1F1B"),
    Case("fsdp", "looped-bfs", 4, theirs="ScheduleLoopedBFS"),
    Case("fsdp", "looped-bfs", 4, whole_stages=1),
    Case("fsdp", "interleaved-1f1b", 2, theirs="ScheduleInterleaved1F1B"),
)


class Measured(NamedTuple):
    """Of one case.

    Attributes:
        sent: bytes of all processes for a step.
        held: bytes of each process between steps, and at the peak of a step, in units of a worker's weights.
        seconds: of steps, by candidate.
    """

    sent: float
    held: Mapping[str, float]
    seconds: dict[str, list[float]]


def parts_of(task: Task, case: Case, mesh: Mesh) -> Mapping[str, Part]:
    """What one process does of each candidate."""
    result: dict[str, Part] = {
        "pipework": ShardedPipe(mesh, task, case.schedule, case.stages, case.kind, case.whole_stages, "never")
    }
    if case.theirs is not None:
        result["pytorch"] = PyTorchSchedule(mesh, task, case.theirs, case.stages)
    return result


def memory_of(task: Task, case: Case, mesh: Mesh) -> Mapping[str, Part]:
    """The pipe alone, with activations that hardly count."""

    def made(task: Task) -> ShardedPipe:
        return ShardedPipe(mesh, task, case.schedule, case.stages, case.kind, case.whole_stages, "always")

    made(Task(task.blocks, 16, task.chunks, task.rows)).tell()  # loads what is loaded once
    return {"pipework": made(task)}


def sent_bytes() -> int:
    """By all processes of this machine to each other, since it started."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def gathered_stages(task: Task, case: Case) -> int:
    """How often a worker gathers one of its stages in a step."""
    if case.whole_stages is None:
        return case.stages
    schedule = build(
        case.schedule, workers=WORKERS, chunks=task.chunks, stages_per_worker=case.stages if case.stages > 1 else None
    )
    orders = with_sharding(schedule, case.whole_stages).orders
    return max(sum(action.kind == "UNSHARD" for action in order) for order in orders)


def expected_bytes(task: Task, case: Case) -> float:
    """Of all processes for a step: messages of stages, and collectives of r replicas, in rings.

    An all-gather of N bytes sends (r - 1) N in all, an all-reduce twice as much. A reduce-scatter would send as much as
    an all-gather; gloo has none, and reduces all.
    """
    boundaries = WORKERS * case.stages - 1
    messages = REPLICAS * 2 * boundaries * task.chunks * task.message_bytes
    weights = WORKERS * (REPLICAS - 1) * task.worker_bytes
    if case.kind == "fsdp":
        return messages + weights * (gathered_stages(task, case) / case.stages + 2)
    return messages + 2 * weights


def expected_held(case: Case) -> float:
    """Between steps, in units of a worker's weights: themselves, and two numbers of AdamW for each."""
    return {"replicas": 3.0, "zero-1": 1 + 2 / REPLICAS, "fsdp": 3 / REPLICAS}[case.kind]


def measure(case: Case, task: Task, large: Task, rounds: int) -> Measured:
    """All of a case."""
    count = WORKERS * REPLICAS
    with two_processes(partial(parts_of, task, case), count, REPLICAS) as processes:
        processes.take("pipework", 2)
        before = sent_bytes()
        processes.take("pipework", _STEPS)
        sent = (sent_bytes() - before) / _STEPS
        names = ["pipework"] if case.theirs is None else ["pipework", "pytorch"]
        seconds = harness.alternate({name: partial(_seconds, processes, name) for name in names}, rounds, warm_up=1)
    with two_processes(partial(memory_of, large, case), count, REPLICAS) as processes:
        told = processes.told("pipework")
    held = {key: median(each[key] for each in told) / large.worker_bytes for key in told[0]}
    return Measured(sent, held, seconds)


def _seconds(processes: TwoProcesses, name: str) -> float:
    return processes.take(name).seconds


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 15, 3, "how often each candidate runs")
    options.add_argument("--width", type=int, default=128, help="of the model whose steps are timed (default 128)")
    options.add_argument("--large", type=int, default=512, help="of the model whose memory is read (default 512)")
    options.add_argument("--only", default="", help="cases with this in their name, such as 'looped-bfs'")
    arguments = options.parse_args(argv)
    task, large = Task(8, arguments.width, 8, 64), Task(8, arguments.large, 4, 2)
    measured: dict[Case, Measured] = {}
    with harness.on_this_machine() as machine:
        for case in (case for case in CASES if arguments.only in str(case)):
            print(case, file=sys.stderr, flush=True)
            measured[case] = measure(case, task, large, arguments.rounds)
    verdicts = report(task, measured)
    results: dict[str, Any] = {str(case): each._asdict() for case, each in measured.items()}
    harness.conclude("sharding", arguments, machine, verdicts, results)


def report(task: Task, measured: Mapping[Case, Measured]) -> list[Verdict]:
    """The table, and what of it was to be reached."""
    rows, verdicts = [], []
    for case, (sent, held, seconds) in measured.items():
        wanted, between = expected_bytes(task, case), expected_held(case)
        ours = median(seconds["pipework"])
        ratio = harness.median_ratio(seconds["pipework"], seconds["pytorch"]) if "pytorch" in seconds else None
        numbers = [sent / 2**20, wanted / 2**20, held["between"], between, held["peak"]]
        times = [f"{ours * 1e3:.1f}", "" if ratio is None else f"{ratio:.2f}"]
        rows.append([str(case), *(f"{number:.2f}" for number in numbers), *times])
        verdicts.append(Verdict(f"{case}: bytes sent above the formula", 100 * (sent / wanted - 1), 5, "%"))
        verdicts.append(Verdict(f"{case}: bytes between steps above it", 100 * (held["between"] / between - 1), 5, "%"))
        if ratio is not None:
            verdicts.append(Verdict(f"{case}: pipework to PyTorch", ratio, 1, "x"))
    print(
        "MiB sent by four processes in a step; memory of each in units of its worker's weights; milliseconds of a step"
    )
    print()
    memory = ["between steps", "formula", "peak of a step"]
    header = ["", "sent", "formula", *memory, "pipework", "to PyTorch"]
    harness.print_table(header, rows)
    return verdicts


if __name__ == "__main__":
    main()
