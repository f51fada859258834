"""Does a stage hold as much memory as its schedule predicts?

One small recorded mini-batch (4 micro-batches) says what a micro-batch keeps on each stage. With that, the simulation
predicts the peak of every checkpoint mode for 8 and 32 micro-batches. The same is measured by watching the storages
that operators make and let go: nothing of what pipework knows about itself takes part in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import pipework.skip
from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.memory.allocator import bytes_in_use
from benchmarks.memory.live import Block, LiveStorages
from benchmarks.memory.separate import with_separate_memories
from benchmarks.unet import UNet
from pipework.model.checkpoint import MODES, checkpointed_micro_batches
from pipework.pipe import Pipe
from pipework.schedule import Costs, build, simulate, with_recompute

RECORDED = 4  # micro-batches of the mini-batch that the prediction comes from
TARGET = 1.05
OUTPUT, PARAMETER_GRADIENT = "output", "parameter gradient"


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        name: for the table.
        build: makes the layers.
        row: the shape of one row of the batch.
        rows: of a micro-batch.
        balances: for each number of stages the layers of each.
    """

    name: str
    build: Callable[[], nn.Sequential]
    row: tuple[int, ...]
    rows: int
    balances: dict[int, list[int]]

    def batch(self, chunks: int) -> Tensor:
        """A mini-batch."""
        return torch.randn(chunks * self.rows, *self.row, generator=torch.Generator().manual_seed(1))

    def pipe(self, stages: int, chunks: int, mode: str) -> Pipe:
        """The model in a pipe of CPU workers."""
        return Pipe(self.build(), chunks, mode, balance=self.balances[stages], devices=["cpu"] * stages)


@dataclass(frozen=True)
class StageMemory:
    """One stage in one mini-batch, in bytes.

    Attributes:
        stage: its number.
        predicted: the simulation's peak.
        meter: the peak that `pipe.record()` notes in this very configuration.
        kept: what was really alive, at most, when a backward began, without gradients and outputs.
        forward: the same at any time: with what operators of a forward need in passing.
        total: with gradients, those of values that wait for the stage among them; without those of parameters.
        outputs: with the outputs, until the caller has them joined.
    """

    stage: int
    predicted: float
    meter: float
    kept: int
    forward: int
    total: int
    outputs: int


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    subject: str
    stages: int
    chunks: int
    mode: str
    memory: list[StageMemory]

    @property
    def most_different(self) -> StageMemory:
        """The stage whose prediction is worst."""
        return max(self.memory, key=lambda each: abs(each.kept - each.predicted) / each.predicted)


@dataclass(frozen=True)
class Process:
    """All workers together, as they are: what they hand over by reference is there once.

    Attributes:
        subject: the model's name.
        chunks: micro-batches.
        predicted: the sum over the stages.
        live: what storages held between forward and backward, the joined output not counted.
        in_use: by how much more malloc had given out than before; None: not known.
    """

    subject: str
    chunks: int
    predicted: float
    live: int
    in_use: int | None


def subjects(width: int, tokens: int, size: int, stages: Sequence[int]) -> list[Subject]:
    """A stack of equal blocks, and a U-Net with skips over several stages."""

    def transformer() -> nn.Sequential:
        torch.manual_seed(0)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        return nn.Sequential(*(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(8)))

    def unet() -> nn.Sequential:
        return UNet(levels=3, width=8).build(pipework.skip)

    return [
        Subject("transformer", transformer, (tokens, width), 4, {count: [8 // count] * count for count in stages}),
        Subject("U-Net", unet, (3, size, size), 2, {2: [33, 22], 4: [15, 18, 14, 8]}),
    ]


def step(pipe: Pipe, batch: Tensor) -> None:
    """Forward, loss and backward."""
    pipe(batch).square().mean().backward()


def recorded_costs(subject: Subject, stages: int) -> Costs:
    """What a micro-batch costs on each stage, from one small mini-batch.

    The default mode has everything in it: micro-batches that keep their input only, and one that keeps all.
    """
    pipe, batch = subject.pipe(stages, RECORDED, "except_last"), subject.batch(RECORDED)
    step(pipe, batch)
    with pipe.record() as recording:
        step(pipe, batch)
    return recording.costs()


def predicted_peaks(costs: Costs, stages: int, chunks: int, mode: str) -> tuple[float, ...]:
    """The peak of each stage's activations, without running anything."""
    schedule = build("gpipe", workers=stages, chunks=chunks)
    checkpointed = checkpointed_micro_batches(mode, chunks)
    if checkpointed:
        schedule = with_recompute(schedule, checkpointed)
    return simulate(schedule, costs, loss_outside=True).peak_memory


def measure(subject: Subject, stages: int, chunks: int, mode: str, costs: Costs) -> Case:
    """One configuration: predicted, noted by the meter, and seen."""
    batch = subject.batch(chunks)
    storages = LiveStorages()
    pipe = with_separate_memories(subject.pipe(stages, chunks, mode), storages)
    list(pipe)[-1].register_forward_hook(lambda _, __, output: storages.label([output], OUTPUT))
    step(pipe, batch)
    pipe.zero_grad()
    with storages.watching([batch, *pipe.parameters(), *pipe.buffers()]):
        step(pipe, batch)
        gradients = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
        storages.label(gradients, PARAMETER_GRADIENT)
    with pipe.record() as recording:
        step(pipe, batch)
    timeline = recording.timeline()

    def is_activation(block: Block) -> bool:
        return not block.gradient and not block.label

    predicted = predicted_peaks(costs, stages, chunks, mode)
    memory = []
    for stage in range(stages):
        own = batch.nbytes if stage == 0 else 0  # the first stage's device holds the caller's batch for the whole step
        memory.append(
            StageMemory(
                stage,
                predicted[stage],
                timeline.peak_memory(stage),
                own + storages.peak_kept(stage, is_activation),
                own + storages.peak(stage, is_activation),
                own + storages.peak(stage, lambda block: not block.label),
                own + storages.peak(stage, lambda block: block.label != PARAMETER_GRADIENT),
            )
        )
    return Case(subject.name, stages, chunks, mode, memory)


def measure_process(subject: Subject, chunks: int, costs: Costs) -> Process:
    """Two stages without checkpointing, measured between forward and backward, when no worker runs."""
    batch = subject.batch(chunks)
    predicted = sum(predicted_peaks(costs, 2, chunks, "never"))

    pipe = subject.pipe(2, chunks, "never")
    for _ in range(2):
        step(pipe, batch)
        pipe.zero_grad()
    gc.collect()
    before = bytes_in_use()
    output = pipe(batch)
    after = bytes_in_use()
    in_use = None if before is None or after is None else after - before + batch.nbytes - output.nbytes

    storages = LiveStorages()
    pipe = subject.pipe(2, chunks, "never")
    step(pipe, batch)
    with storages.watching([batch, *pipe.parameters(), *pipe.buffers()]):
        output = pipe(batch)
        live = storages.alive() + batch.nbytes - output.nbytes
    return Process(subject.name, chunks, predicted, live, in_use)


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_argument("--stages", type=int, nargs="+", choices=(2, 4), default=[2, 4], help="(default 2 4)")
    options.add_argument("--chunks", type=int, nargs="+", help="micro-batches (default 8 32; with --quick 8)")
    options.add_argument("--width", type=int, default=64, help="of the transformer (default 64)")
    options.add_argument("--tokens", type=int, default=128, help="of a row (default 128)")
    options.add_argument("--size", type=int, default=64, help="of the U-Net's images (default 64)")
    arguments = options.parse_args(argv)
    chunks = arguments.chunks or ([8] if arguments.quick else [8, 32])

    cases, processes = [], []
    with harness.on_this_machine() as machine:
        for subject in subjects(arguments.width, arguments.tokens, arguments.size, arguments.stages):
            for stages in arguments.stages:
                costs = recorded_costs(subject, stages)
                cases += [measure(subject, stages, count, mode, costs) for count in chunks for mode in MODES]
            costs = recorded_costs(subject, 2)
            processes += [measure_process(subject, count, costs) for count in chunks]

    verdicts = report(cases, processes)
    results = {
        "unit": "bytes",
        "recorded_micro_batches": RECORDED,
        "cases": [asdict(case) for case in cases],
        "processes": [asdict(process) for process in processes],
    }
    harness.conclude("memory", arguments, machine, verdicts, results)


def report(cases: Sequence[Case], processes: Sequence[Process]) -> list[Verdict]:
    """Prints both tables; returns the verdicts."""
    print(
        f"peaks of the stage whose prediction is worst, in MB (1e6 bytes); predicted from {RECORDED} recorded "
        "micro-batches;\nthe last three columns: the largest of all stages, above the prediction\n"
    )
    rows = []
    for case in cases:
        worst = case.most_different
        rows.append(
            [
                f"{case.subject}, {case.stages} stages",
                str(case.chunks),
                case.mode,
                str(worst.stage),
                *(f"{size / 1e6:.2f}" for size in (worst.predicted, worst.meter, worst.kept)),
                above(worst.kept, worst.predicted),
                *(
                    f"{max(getattr(each, name) / each.predicted - 1 for each in case.memory):+.1%}"
                    for name in ("forward", "total", "outputs")
                ),
            ]
        )
    header = ["", "chunks", "checkpoint", "stage", "predicted", "meter", "kept", "", "forward", "gradients", "outputs"]
    harness.print_table(header, rows)

    print("\nboth stages in one process, without checkpointing, between forward and backward: MB\n")
    rows = []
    for process in processes:
        rows.append(
            [
                f"{process.subject}, {process.chunks} chunks",
                f"{process.predicted / 1e6:.2f}",
                f"{process.live / 1e6:.2f}",
                above(process.live, process.predicted),
                "" if process.in_use is None else f"{process.in_use / 1e6:.2f}",
                "" if process.in_use is None else above(process.in_use, process.live),
            ]
        )
    harness.print_table(["", "predicted", "storages", "", "malloc", "above storages"], rows)
    return verdicts_of(cases, processes)


def above(value: float, reference: float) -> str:
    """By how much a value is above another."""
    return f"{value / reference - 1:+.1%}"


def verdicts_of(cases: Sequence[Case], processes: Sequence[Process]) -> list[Verdict]:
    """The targets: within 5%, in either direction, on the worst stage."""
    verdicts = []
    for what, name in (
        ("kept", "kept"),
        ("the meter's peak", "meter"),
        ("activations at any time", "forward"),
        ("everything at any time", "outputs"),
    ):
        for mode in MODES:
            stages = [each for case in cases if case.mode == mode for each in case.memory]
            worst = max(harness.factor(getattr(each, name), each.predicted) for each in stages)
            verdicts.append(Verdict(f"{what}, checkpoint {mode!r}, worst stage to predicted", worst, TARGET, "x"))
    malloc = [harness.factor(process.in_use, process.live) for process in processes if process.in_use]
    if malloc:
        verdicts.append(Verdict("malloc to storages, worst case", max(malloc), TARGET, "x"))
    return verdicts


if __name__ == "__main__":
    main()
