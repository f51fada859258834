"""How many activations do the schedules with halves hold, beside 1F1B?

Equal blocks, a worker's share cut in one stage or in two, no checkpointing. One recorded mini-batch says what a
micro-batch holds on each stage, whole and between the halves of its backward; with that the simulation predicts the
peak of each worker. The same is measured by watching the storages that operators make and let go.

Bytes depend on the order of a worker's actions alone, not on how fast it is: each run prints the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.feed_forward import FeedForward
from benchmarks.harness import Verdict
from benchmarks.memory.live import LiveStorages
from benchmarks.memory.separate import with_separate_memories
from pipework.pipe import Pipe
from pipework.schedule import SCHEDULES

NAMES = ("1f1b", "zb-h1", "zb-v", "v-half", "v-min")
CHUNKS = 16
TARGET = 1.05
SENT, PARAMETER_GRADIENT = "sent", "parameter gradient"


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Keeps nothing but the output; the target is there because a loss has one."""
    return output.square().mean()


@dataclass(frozen=True)
class Case:
    """A schedule with a number of workers; bytes of each worker, at most.

    Attributes:
        schedule: its name.
        workers: how many.
        simulated: with the costs of a recorded mini-batch.
        meter: what `pipe.record()` notes.
        measured: what was really alive between two actions, without parameters and their gradients.
    """

    schedule: str
    workers: int
    simulated: tuple[float, ...]
    meter: tuple[float, ...]
    measured: tuple[int, ...]


def make(name: str, workers: int, width: int) -> Pipe:
    """Two blocks a worker, in one stage or in two."""
    stages = workers * SCHEDULES[name].stages_per_worker
    torch.manual_seed(0)
    blocks = nn.Sequential(*(FeedForward(width) for _ in range(2 * workers)))
    balance, devices = [2 * workers // stages] * stages, ["cpu"] * workers
    return Pipe(blocks, CHUNKS, "never", balance=balance, devices=devices, schedule=name, loss_fn=loss)


def step(pipe: Pipe, batch: Tensor) -> None:
    """Forward, loss and backward."""
    pipe(batch, target=torch.zeros(len(batch))).backward()


def measure(name: str, workers: int, width: int, rows: int) -> Case:
    """Simulated, noted by the meter, and seen."""
    batch = torch.randn(CHUNKS * rows, width, generator=torch.Generator().manual_seed(1))
    pipe = make(name, workers, width)
    step(pipe, batch)  # the first one shows which gradients can wait
    with pipe.record() as recording:
        step(pipe, batch)
    timeline, simulated = recording.timeline(), recording.predicted().peak_memory
    meter = tuple(timeline.peak_memory(worker) for worker in range(workers))
    return Case(name, workers, simulated, meter, seen(make(name, workers, width), batch))


def seen(pipe: Pipe, batch: Tensor) -> tuple[int, ...]:
    """The most that was alive on each worker when a forward began or ended there."""
    storages = LiveStorages()
    pipe = with_separate_memories(pipe, storages, when_taken=True)
    for worker, partition in zip(pipe.schedule().placement, pipe.partitions, strict=True):
        look(storages, worker, partition, last=partition is pipe.partitions[-1])
    step(pipe, batch)  # the first one shows which gradients can wait
    pipe.zero_grad()
    with storages.watching([batch, *pipe.parameters()]):
        step(pipe, batch)
        storages.label([p.grad for p in pipe.parameters() if p.grad is not None], PARAMETER_GRADIENT)
    return tuple(most_between_actions(storages, worker) for worker in range(len(pipe.devices)))


def look(storages: LiveStorages, worker: int, layers: nn.Sequential, *, last: bool) -> None:
    """Notes when a stage's forwards begin and end. What it hands on is not its own any more; the loss keeps its own."""

    def begins(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        storages.label(inputs, "")
        storages.moment(worker)

    def ends(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        if not last:
            storages.label([output], SENT)
        storages.moment(worker)

    layers[0].register_forward_pre_hook(begins)
    layers[-1].register_forward_hook(ends)


def most_between_actions(storages: LiveStorages, worker: int) -> int:
    """The peak of a worker's own storages: saved values, and the gradients that wait for a W."""
    sizes: dict[int, int] = {}
    most = 0
    for sign, block in storages.events:
        if block.owner != worker:
            continue
        if sign > 0:
            sizes[id(block)] = 0 if block.label else block.size
        elif sign < 0:
            sizes.pop(id(block))
        elif not block.gradient:
            most = max(most, sum(sizes.values()))
    return most


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_argument("--workers", type=int, nargs="+", help="(default 4 8; with --quick 4)")
    options.add_argument("--width", type=int, default=128, help="of a block (default 128)")
    options.add_argument("--rows", type=int, default=256, help="of a micro-batch (default 256)")
    arguments = options.parse_args(argv)
    counts = arguments.workers or ([4] if arguments.quick else [4, 8])
    with harness.on_this_machine() as machine:
        cases = [measure(name, count, arguments.width, arguments.rows) for count in counts for name in NAMES]
    verdicts = report(cases)
    harness.conclude(
        "v_half", arguments, machine, verdicts, {"unit": "bytes", "cases": [asdict(case) for case in cases]}
    )


def report(cases: Sequence[Case]) -> list[Verdict]:
    """Prints the table; returns the verdicts."""
    print(f"activations of the worker that holds most, {CHUNKS} micro-batches, in MB (1e6 bytes), and beside 1F1B's\n")
    rows, verdicts = [], []
    for case in cases:
        base = next(each for each in cases if (each.schedule, each.workers) == ("1f1b", case.workers))
        kinds = [(values, max(values) / max(whole)) for values, whole in both(case, base)]
        rows.append(
            [
                f"{case.schedule}, {case.workers} workers",
                *(f"{max(values) / 1e6:.2f}" for values, _ in kinds),
                *(f"{share:.1%}" for _, share in kinds[:2]),
            ]
        )
        worst = max(harness.factor(a, b) for a, b in zip(case.measured, case.simulated, strict=True))
        verdicts.append(Verdict(f"{rows[-1][0]}: measured to simulated, worst worker", worst, TARGET, "x"))
        if case.schedule == "v-half":
            # As it is built: (p + 2) // 2 micro-batches of 1F1B's p.
            wanted = TARGET * ((case.workers + 2) // 2) / case.workers
            verdicts.append(Verdict(f"{rows[-1][0]}: measured, of 1F1B's", kinds[1][1], wanted, "x"))
    harness.print_table(["", "simulated", "measured", "meter", "simulated", "measured"], rows)
    return verdicts


def both(case: Case, base: Case) -> list[tuple[Sequence[float], Sequence[float]]]:
    """The bytes of a case beside those of another, in the order of the table."""
    return [(case.simulated, base.simulated), (case.measured, base.measured), (case.meter, base.meter)]


if __name__ == "__main__":
    main()
