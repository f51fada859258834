"""How much faster does a U-Net train in two stages on two cores?

A U-Net with long skips trains for one mini-batch: forward, loss, backward. The plain model on one core is the baseline.
pipework and torchgpipe run the same layers in one and in two partitions, without checkpointing and with all of it. The
plain model with two intra-op threads shows how PyTorch alone uses two cores. All candidates take turns in one run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

import pipework.skip
from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.unet import NORMS, UNet
from pipework.pipe import Pipe

BASELINE = "plain, one core, micro-batch by micro-batch"
WHOLE = "plain, one core, whole batch"
TWO_THREADS = "plain, two threads, micro-batch by micro-batch"
WHOLE_TWO_THREADS = "plain, two threads, whole batch"
PARTITIONS = (1, 2)
MODES = ("never", "except_last", "always")
TARGET = 1.6  # times as fast as one core


@dataclass(frozen=True)
class Task:
    """The model and the mini-batch of all candidates."""

    network: UNet
    size: int  # of the square images
    rows: int  # of a micro-batch
    chunks: int
    modes: tuple[str, ...]  # of checkpointing

    def batch(self) -> Tensor:
        """The same mini-batch each time."""
        shape = (self.rows * self.chunks, self.network.channels, self.size, self.size)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1))

    @property
    def ideal(self) -> float:
        """How much faster two stages of equal halves are in fill-drain, if both cores are as fast as one alone."""
        return 2 * self.chunks / (self.chunks + 1)


@dataclass(frozen=True)
class Runner:
    """One candidate.

    Attributes:
        model: whose gradients it leaves.
        run: forward, loss and backward.
        like: which candidate's gradients they must equal.
        threads: intra-op threads of the calling thread; pipe workers always have one.
    """

    model: nn.Module
    run: Callable[[], None]
    like: str = BASELINE
    threads: int = 1

    def candidate(self) -> harness.Candidate:
        """Times a step with cleared gradients."""

        def prepare() -> None:
            torch.set_num_threads(self.threads)
            self.model.zero_grad()

        once = harness.timed(self.run, before=prepare)

        def candidate() -> float:
            try:
                return once()
            finally:
                torch.set_num_threads(1)

        return candidate


def loss_of(output: Tensor) -> Tensor:
    """The mean square."""
    return output.square().mean()


def accumulating(model: nn.Module, pieces: Sequence[Tensor]) -> Callable[[], None]:
    """The model as it is, on the calling thread: gradient accumulation over the pieces."""

    def run() -> None:
        for piece in pieces:
            (loss_of(model(piece)) / len(pieces)).backward()

    return run


def piped(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    """A pipeline that gives its outputs to a loss outside."""

    def run() -> None:
        loss_of(model(batch)).backward()

    return run


def runners(task: Task, balance: list[int]) -> dict[str, Runner]:
    """All candidates by name."""
    batch = task.batch()
    pieces = batch.chunk(task.chunks)
    plain = task.network.build(pipework.skip)
    # A batch norm sees the whole batch or a micro-batch: other statistics, other gradients. A group norm sees rows.
    whole = WHOLE if task.network.norm == "batch" else BASELINE
    result = {
        BASELINE: Runner(plain, accumulating(plain, pieces)),
        WHOLE: Runner(plain, accumulating(plain, [batch]), like=whole),
        TWO_THREADS: Runner(plain, accumulating(plain, pieces), threads=2),
        WHOLE_TWO_THREADS: Runner(plain, accumulating(plain, [batch]), like=whole, threads=2),
    }
    other = harness.old_library("torchgpipe", "0.0.7", "torchgpipe.skip")  # its names are those of pipework.skip
    for partitions in PARTITIONS:
        cut = balance if partitions == 2 else [sum(balance)]
        devices = ["cpu"] * partitions
        for mode in task.modes:
            pipe = Pipe(task.network.build(pipework.skip), task.chunks, mode, balance=cut, devices=devices)
            result[named("pipework", partitions, mode)] = Runner(pipe, piped(pipe, batch))
            if other is not None:
                from torchgpipe import GPipe

                gpipe = GPipe(task.network.build(other), cut, devices=devices, chunks=task.chunks, checkpoint=mode)
                result[named("torchgpipe", partitions, mode)] = Runner(gpipe, piped(gpipe, batch))
    order = [name for library in ("plain", "pipework", "torchgpipe") for name in result if name.startswith(library)]
    return {name: result[name] for name in order}


def named(library: str, partitions: int, mode: str) -> str:
    """A pipeline's name in the table."""
    return f"{library}, pipeline-{partitions}, checkpoint {mode!r}"


def check(candidates: dict[str, Runner]) -> None:
    """All candidates must compute the same gradients."""
    gradients: dict[str, list[Tensor]] = {}
    for name, runner in candidates.items():
        runner.candidate()()
        gradients[name] = harness.gradients_of(runner.model)
        harness.check_gradients(name, gradients[name], gradients[runner.like], of_largest=1e-4, atol=1e-7)


def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed instead of returning it to the system; False: this C library does not listen.

    Otherwise the plain model's large tensors come back as new pages each time, for up to a third of its time, while the
    workers' heaps keep theirs: the pipelines would win by an accident of malloc.
    """
    no_separate_mappings, trim_threshold = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(no_separate_mappings, 0) and mallopt(trim_threshold, 2**31 - 1))


def halves(task: Task, given: list[int] | None) -> list[int]:
    """How many layers each of two partitions has: measured on one micro-batch, with one thread, unless it is given."""
    if given is not None:
        return given
    return pipework.balance_by_time(2, task.network.build(pipework.skip), task.batch()[: task.rows], timeout=3.0)


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 7, 2, "how often each candidate runs")
    options.add_argument("--levels", type=int, default=3, help="of the U-Net (default 3)")
    options.add_argument("--width", type=int, default=16, help="channels of the finest level (default 16)")
    options.add_argument("--convolutions", type=int, default=2, help="in a block (default 2)")
    options.add_argument("--norm", choices=NORMS, default="batch", help="(default batch)")
    options.add_argument("--size", type=int, default=64, help="of the images (default 64)")
    options.add_argument("--rows", type=int, default=4, help="of a micro-batch (default 4)")
    options.add_argument("--chunks", type=int, default=32, help="micro-batches (default 32)")
    options.add_argument("--modes", nargs="+", choices=MODES, default=["never", "always"], help="checkpoint modes")
    options.add_argument("--balance", type=int, nargs=2, help="layers of the two partitions (default: by time)")
    arguments = options.parse_args(argv)
    rounds = arguments.rounds
    network = UNet(arguments.levels, arguments.width, arguments.convolutions, arguments.norm)
    task = Task(network, arguments.size, arguments.rows, arguments.chunks, tuple(arguments.modes))

    keeps = keep_freed_memory()
    with harness.on_this_machine() as machine:
        balance = halves(task, arguments.balance)
        candidates = runners(task, balance)
        check(candidates)
        seconds = harness.alternate(
            {name: runner.candidate() for name, runner in candidates.items()}, rounds, warm_up=1
        )
        busy = busy_shares(task, balance)

    report(seconds, task, balance, busy, rounds)
    verdicts = verdicts_of(seconds, task)
    results = {
        "task": {**vars(task), "network": vars(network)},
        "balance": balance,
        "busy_shares": busy,
        "freed_memory_is_kept": keeps,
        "rounds": rounds,
        "seconds": seconds,
    }
    harness.conclude("unet_speed", arguments, machine, verdicts, results)


def busy_shares(task: Task, balance: list[int]) -> list[float]:
    """The share of the work that each of the two stages has, as a recording of one step tells."""
    pipe = Pipe(task.network.build(pipework.skip), task.chunks, "never", balance=balance, devices=["cpu"] * 2)
    step = piped(pipe, task.batch())
    step()
    with pipe.record() as recording:
        step()
    busy = [recording.timeline().busy(worker) for worker in range(2)]
    return [seconds / sum(busy) for seconds in busy]


def report(seconds: dict[str, list[float]], task: Task, balance: list[int], busy: list[float], rounds: int) -> None:
    """The table."""
    network = task.network
    print(
        f"U-Net of {network.levels} levels, {network.convolutions} convolutions in a block, {network.width} channels, "
        f"{network.norm} norm, images of {task.size} x {task.size};\n"
        f"{task.chunks} micro-batches of {task.rows} rows; two partitions of {balance[0]} and {balance[1]} layers, "
        f"{busy[0]:.1%} and {busy[1]:.1%} of the recorded work;\n"
        f"seconds for forward, loss and backward: medians of {rounds} rounds in turns\n"
    )
    samples = task.rows * task.chunks
    rows = []
    for name, times in seconds.items():
        rows.append(
            [
                name,
                f"{median(times):.3f}",
                harness.middle_half(times),
                f"{samples / median(times):.1f}",
                f"{1 / share(seconds, name, BASELINE):.2f}",
                f"{1 / share(seconds, name, WHOLE):.2f}",
            ]
        )
    harness.print_table(["", "seconds", "middle half", "samples/s", "x micro-batched", "x whole batch"], rows)
    print(f"\nfill-drain with two equal stages: at most {task.ideal:.2f} x")


def share(seconds: dict[str, list[float]], name: str, of: str) -> float:
    """The time as a share of another's."""
    return harness.median_ratio(seconds[name], seconds[of])


def verdicts_of(seconds: dict[str, list[float]], task: Task) -> list[Verdict]:
    """The targets. Smaller is better in a verdict, so speed-ups stand upside down: 1.6 x is 0.625."""
    verdicts = []
    if "never" in task.modes:
        ours, one = named("pipework", 2, "never"), named("pipework", 1, "never")
        verdicts = [
            Verdict("pipeline-2's time to the one-core baseline's", share(seconds, ours, BASELINE), 1 / TARGET, "x"),
            Verdict("pipeline-2's time to the whole batch's on one core", share(seconds, ours, WHOLE), 1 / TARGET, "x"),
            Verdict("pipeline-1's time to the one-core baseline's", share(seconds, one, BASELINE), 1.05, "x"),
        ]
    for mode in task.modes:
        other = named("torchgpipe", 2, mode)
        if other in seconds:
            ratio = share(seconds, named("pipework", 2, mode), other)
            verdicts.append(Verdict(f"pipeline-2's time to torchgpipe's, checkpoint {mode!r}", ratio, 1.0, "x"))
    return verdicts


if __name__ == "__main__":
    main()
