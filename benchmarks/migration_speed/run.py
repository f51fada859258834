"""Is an old script faster through its adapter than on the library that it was written for?

The same lines make a pipe of two CPU partitions and take training steps with it, once with torchgpipe's or fairscale's
own class and once with the adapter's, in turns in one run. `torch.distributed.pipeline.sync` is gone from PyTorch: its
adapter stands beside the un-pipelined model. The last line of each group is a script that has left its old library.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.migration_speed.scripts import (
    LIBRARIES,
    Script,
    Task,
    remote_procedures,
    rewritten,
    running,
    unpipelined,
)
from benchmarks.two_stage_speed.task import Task as Transformer
from benchmarks.unet import UNet
from benchmarks.unet_speed.run import keep_freed_memory
from pipework import balance_by_time, skip

ONE_CORE = "un-pipelined, one core"
REWRITTEN = "rewritten: pipework, 1f1b"
MODES = ("never", "except_last", "always")
MODELS = ("transformer", "unet")


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        mode: of checkpointing; None: no pipe.
        library: the old library; None: none.
        original: whether the script runs on the library itself.
    """

    mode: str | None = None
    library: str | None = None
    original: bool = False

    @property
    def name(self) -> str:
        """Its name in the table."""
        if self.mode is None:
            return ONE_CORE
        what = REWRITTEN
        if self.library is not None:
            what = f"{self.library}, {'itself' if self.original else 'adapter'}"
        return f"{what}, {self.mode!r}"


def transformer(width: int, tokens: int, rows: int, chunks: int) -> Task:
    """Eight equal blocks."""
    model = Transformer(width=width, tokens=tokens, rows=rows, chunks=chunks)
    return Task(lambda _: model.model(), model.batch(), model.balance("gpipe"), chunks)


def unet(width: int, size: int, rows: int, chunks: int, balance: list[int] | None) -> Task:
    """Three levels, whose skips go from the first partition to the second."""
    network = UNet(width=width)
    shape = (rows * chunks, network.channels, size, size)
    generator = torch.Generator().manual_seed(1)
    batch, target = (torch.randn(shape, generator=generator) for _ in range(2))
    halves = balance or balance_by_time(2, network.build(skip), batch[:rows], timeout=3.0)
    return Task(network.build, (batch, target), halves, chunks)


def check(scripts: dict[Line, Script]) -> None:
    """All scripts must compute the same gradients."""
    expected: list[Tensor] = []
    for line, script in scripts.items():
        script.step()
        gradients = harness.gradients_of(script.model)
        expected = expected or gradients
        harness.check_gradients(line.name, gradients, expected, of_largest=1e-4, atol=1e-7)


def measure(task: Task, modes: list[str], rounds: int) -> dict[Line, list[float]]:
    """The seconds of the steps of all scripts, in turns."""
    with running() as start:
        scripts = {Line(): unpipelined(task)}
        for mode in modes:
            for library in LIBRARIES:
                original = library.original()
                if original is not None:
                    scripts[Line(mode, library.name, original=True)] = start(original, task, mode)
                scripts[Line(mode, library.name)] = start(library.through_the_adapter(), task, mode)
            scripts[Line(mode)] = start(rewritten, task, mode)
        check(scripts)
        candidates = {
            line.name: harness.timed(script.step, before=script.model.zero_grad) for line, script in scripts.items()
        }
        seconds = harness.alternate(candidates, rounds)
    return {line: seconds[line.name] for line in scripts}


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 15, 3, "how often each candidate runs")
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: both)")
    options.add_argument("--modes", nargs="+", choices=MODES, default=["never", "except_last"], help="of checkpointing")
    options.add_argument("--chunks", type=int, default=8, help="micro-batches (default 8)")
    options.add_argument("--rows", type=int, default=4, help="of a micro-batch (default 4)")
    options.add_argument("--width", type=int, default=128, help="of the transformer (default 128)")
    options.add_argument("--tokens", type=int, default=64, help="of a row of the transformer (default 64)")
    options.add_argument("--channels", type=int, default=16, help="of the U-Net's finest level (default 16)")
    options.add_argument("--size", type=int, default=32, help="of the U-Net's images (default 32)")
    options.add_argument("--balance", type=int, nargs=2, help="layers of the U-Net's partitions (default: by time)")
    arguments = options.parse_args(argv)
    rounds = arguments.rounds

    keeps = keep_freed_memory()
    tasks, seconds = {}, {}
    with harness.on_this_machine() as machine, remote_procedures():
        for model in arguments.models:
            if model == "transformer":
                task = transformer(arguments.width, arguments.tokens, arguments.rows, arguments.chunks)
            else:
                task = unet(arguments.channels, arguments.size, arguments.rows, arguments.chunks, arguments.balance)
            tasks[model] = task
            seconds[model] = measure(task, arguments.modes, rounds)

    verdicts = []
    for model, times in seconds.items():
        report(model, tasks[model], times, rounds)
        verdicts += verdicts_of(model, times)
    results = {
        "arguments": {name: value for name, value in vars(arguments).items() if name not in ("quick", "save")},
        "balance": {model: task.balance for model, task in tasks.items()},
        "freed_memory_is_kept": keeps,
        "rounds": rounds,
        "seconds": {model: {line.name: each for line, each in times.items()} for model, times in seconds.items()},
    }
    harness.conclude("migration_speed", arguments, machine, verdicts, results)


def report(model: str, task: Task, seconds: dict[Line, list[float]], rounds: int) -> None:
    """The table of a model."""
    left, right = task.balance
    print(
        f"{model}, two CPU partitions of {left} and {right} layers, {task.chunks} micro-batches of "
        f"{len(task.batch[0]) // task.chunks} rows, one intra-op thread each;\n"
        f"seconds for forward, loss and backward: medians of {rounds} rounds in turns\n"
    )
    rows = []
    for line, times in seconds.items():
        original = seconds.get(Line(line.mode, line.library, original=True))
        rows.append(
            [
                line.name,
                f"{median(times):.3f}",
                harness.middle_half(times),
                f"{harness.median_ratio(times, seconds[Line()]):.3f}",
                *(
                    ["", ""]
                    if original is None
                    else [f"{harness.median_ratio(times, original):.3f}", fastest(times, original)]
                ),
            ]
        )
    harness.print_table(["", "seconds", "middle half", "of one core", "of the original", "fastest runs"], rows)
    print()


def fastest(times: list[float], original: list[float]) -> str:
    """The ratio of the fastest runs, which knows least of what else the machine did."""
    return f"{min(times) / min(original):.3f}"


def verdicts_of(model: str, seconds: dict[Line, list[float]]) -> list[Verdict]:
    """An adapter has to be faster than its original, and faster than no pipe where there is no original."""
    verdicts = []
    for line, times in seconds.items():
        if line.library is None or line.original:
            continue
        original = seconds.get(Line(line.mode, line.library, original=True))
        rival = "the original" if original is not None else ONE_CORE
        ratio = harness.median_ratio(times, original or seconds[Line()])
        verdicts.append(Verdict(f"faster than {rival}: {model}, {line.name}", ratio, 1.0, "x"))
    return verdicts


if __name__ == "__main__":
    main()
