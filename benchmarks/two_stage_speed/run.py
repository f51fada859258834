"""How fast is a two-stage pipeline on two cores?

A transformer of 8 equal blocks trains for one mini-batch of 8 micro-batches: forward, loss, backward. Un-pipelined on
one core, it takes T. Two stages of half the blocks each, working at the same time, need 9 slots of T/16 in fill-drain,
since each of them waits for one slot: 9/16 T is the ideal. Everyone takes turns in one run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from a checkout as it is

from benchmarks.measure import (
    Candidate,
    Verdict,
    alternate,
    conclude,
    median_ratio,
    on_this_machine,
    parser,
    print_table,
    quartiles,
    timed,
)
from pipework.pipe import Pipe

ONE_CORE = "un-pipelined, one core, micro-batch by micro-batch"
WHOLE = "un-pipelined, one core, the whole batch at once"
PIPEWORK = "pipework, 2 stages"
TORCHGPIPE = "torchgpipe 0.0.7, 2 partitions"
PIPELINING = "torch.distributed.pipelining GPipe, 2 gloo processes"


@dataclass(frozen=True)
class Task:
    """What everyone computes."""

    blocks: int = 8
    width: int = 256
    tokens: int = 128
    rows: int = 4  # of a micro-batch
    chunks: int = 8

    def model(self) -> nn.Sequential:
        """The same model, with the same values, in every process."""
        torch.manual_seed(0)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layers = [nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, **options) for _ in range(self.blocks)]
        return nn.Sequential(*layers)

    def batch(self) -> Tensor:
        """The same mini-batch, in every process."""
        return torch.randn(self.rows * self.chunks, self.tokens, self.width, generator=torch.Generator().manual_seed(1))

    @property
    def ideal(self) -> float:
        """Fill-drain with two stages, as a share of the one-core time."""
        return (self.chunks + 1) / (2 * self.chunks)


def loss_of(output: Tensor) -> Tensor:
    """The mean square."""
    return output.square().mean()


def gradients_of(model: nn.Module) -> list[Tensor]:
    """What the last step left."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def training(model: nn.Module, run: Callable[[], object]) -> Candidate:
    """Times forward, loss and backward with cleared gradients."""
    return timed(run, before=model.zero_grad)


def unpipelined(task: Task, model: nn.Module, batch: Tensor, *, micro_batched: bool) -> Callable[[], None]:
    """The model as it is, on the calling thread."""
    pieces = batch.chunk(task.chunks if micro_batched else 1)

    def run() -> None:
        for piece in pieces:
            (loss_of(model(piece)) / len(pieces)).backward()

    return run


def outside_loss(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    """A pipeline in this process that gives its outputs to a loss outside."""

    def run() -> None:
        loss_of(model(batch)).backward()

    return run


def serve_stage(rank: int, task: Task, rendezvous: str, connection: Any) -> None:
    """One of two processes of torch.distributed.pipelining.

    It sleeps until told to run a step, and replies with start and end. The loss is inside, one for each micro-batch:
    their mean is the loss of the whole batch, as outside.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    half = task.blocks // 2
    model = task.model()[half * rank : half * (rank + 1)]
    batch = task.batch()
    # It learns the shapes in the first step, which is not timed.
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))

    def part_of_loss(output: Tensor, _: Tensor) -> Tensor:
        return loss_of(output) / task.chunks

    schedule = ScheduleGPipe(stage, task.chunks, loss_fn=part_of_loss, scale_grads=False)
    while True:
        command = connection.recv()  # blocks without using the core
        if command == "end":
            break
        if command == "gradients":
            connection.send([gradient.numpy() for gradient in gradients_of(model)])
            continue
        model.zero_grad()
        start = time.perf_counter()
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
        connection.send((start, time.perf_counter()))
    dist.destroy_process_group()


class TwoProcesses:
    """The two processes of torch.distributed.pipelining, kept for the whole run."""

    def __init__(self, task: Task, rendezvous: str) -> None:
        context = get_context("spawn")
        self._connections = []
        self._processes = []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=serve_stage, args=(rank, task, rendezvous, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def step(self) -> float:
        """From the first process's start to the last one's end; both read the same system clock."""
        starts, ends = zip(*self._ask("step"), strict=True)
        return max(ends) - min(starts)

    def gradients(self) -> list[Tensor]:
        """What the last step left."""
        return [torch.from_numpy(gradient) for gradients in self._ask("gradients") for gradient in gradients]

    def end(self) -> None:
        """Ends the processes and waits for them."""
        for connection in self._connections:
            connection.send("end")
        for process in self._processes:
            process.join(timeout=30)

    def kill(self) -> None:
        """Makes sure that they have ended."""
        for process in self._processes:
            process.kill()

    def _ask(self, command: str) -> list[Any]:
        for connection in self._connections:
            connection.send(command)
        return [connection.recv() for connection in self._connections]


@contextmanager
def two_processes(task: Task) -> Iterator[TwoProcesses]:
    """Starts the two processes, and ends them."""
    with tempfile.TemporaryDirectory() as folder:
        processes = TwoProcesses(task, f"{folder}/rendezvous")
        try:
            yield processes
            processes.end()
        finally:
            processes.kill()


def torchgpipe_model(task: Task, model: nn.Sequential) -> nn.Module | None:
    """The model in torchgpipe; None where that is not installed."""
    try:
        from torchgpipe import GPipe
    except ImportError:
        print("torchgpipe is not installed and left out: pip install --no-deps torchgpipe==0.0.7\n")
        return None
    half = task.blocks // 2
    pipe: nn.Module = GPipe(model, balance=[half, half], devices=["cpu", "cpu"], chunks=task.chunks, checkpoint="never")
    return pipe


def check(candidates: dict[str, Candidate], gradients: Callable[[str], list[Tensor]]) -> None:
    """Everyone must compute the same gradients."""
    candidates[ONE_CORE]()
    expected = gradients(ONE_CORE)
    for name, candidate in candidates.items():
        candidate()
        for got, wanted in zip(gradients(name), expected, strict=True):
            assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-6), f"other gradients: {name}"


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="how often everyone runs (default 21; with --quick 5)")
    options.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    options.add_argument("--tokens", type=int, default=128, help="of a row (default 128)")
    arguments = options.parse_args(argv)
    rounds = arguments.rounds or (5 if arguments.quick else 21)
    task = Task(width=arguments.width, tokens=arguments.tokens)

    with on_this_machine() as machine, two_processes(task) as processes:
        seconds = measure(task, processes, rounds)

    report(seconds, task, rounds)
    verdicts = judge(seconds, task)
    results = {"task": vars(task), "rounds": rounds, "seconds": seconds}
    conclude("two_stage_speed", arguments, machine, verdicts, results)


def measure(task: Task, processes: TwoProcesses, rounds: int) -> dict[str, list[float]]:
    """The seconds of everyone."""
    batch = task.batch()
    half = task.blocks // 2
    plain = task.model()
    pipe = Pipe(task.model(), task.chunks, "never", balance=[half, half], devices=["cpu", "cpu"])
    other = torchgpipe_model(task, task.model())

    candidates = {
        ONE_CORE: training(plain, unpipelined(task, plain, batch, micro_batched=True)),
        WHOLE: training(plain, unpipelined(task, plain, batch, micro_batched=False)),
        PIPEWORK: training(pipe, outside_loss(pipe, batch)),
        **({} if other is None else {TORCHGPIPE: training(other, outside_loss(other, batch))}),
        PIPELINING: processes.step,
    }
    modules: dict[str, Any] = {ONE_CORE: plain, WHOLE: plain, PIPEWORK: pipe, TORCHGPIPE: other}

    check(candidates, lambda name: processes.gradients() if name == PIPELINING else gradients_of(modules[name]))
    return alternate(candidates, rounds, warm_up=2)


def report(seconds: dict[str, list[float]], task: Task, rounds: int) -> None:
    """The table."""
    print(
        f"{task.blocks} blocks of width {task.width}, {task.tokens} tokens, {task.chunks} micro-batches of {task.rows} "
        f"rows, no checkpointing, one intra-op thread each;\n"
        f"seconds for forward, loss and backward: medians of {rounds} rounds in turns\n"
    )
    ideal = task.ideal * median(seconds[ONE_CORE])
    rows = [["fill-drain ideal, 9/16 of one core", f"{ideal:.3f}", "", f"{task.ideal:.3f}", "1.000", "1.000"]]
    for name, times in seconds.items():
        low, high = quartiles(times)
        share = median_ratio(times, seconds[ONE_CORE])
        fastest = min(times) / min(seconds[ONE_CORE])
        rows.append(
            [
                name,
                f"{median(times):.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{share:.3f}",
                f"{share / task.ideal:.3f}",
                f"{fastest / task.ideal:.3f}",
            ]
        )
    print_table(["", "seconds", "middle half", "of one core", "of the ideal", "fastest runs"], rows)


def judge(seconds: dict[str, list[float]], task: Task) -> list[Verdict]:
    """What was to be reached."""
    ours = seconds[PIPEWORK]
    to_ideal = median_ratio(ours, seconds[ONE_CORE]) / task.ideal
    verdicts = [Verdict("pipework to the fill-drain ideal", to_ideal, 1.05, "x")]
    for name in (ONE_CORE, TORCHGPIPE, PIPELINING):
        if name in seconds:
            verdicts.append(Verdict(f"pipework to {name}", median_ratio(ours, seconds[name]), 1.0, "x"))
    return verdicts


if __name__ == "__main__":
    main()
