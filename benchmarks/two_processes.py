"""Gloo processes, mostly two, that run steps on request: of pipework's pipes, and of torch.distributed.pipelining.

They live as long as the benchmark, and block without using their cores while other candidates run.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

import pipework
from benchmarks.harness import gradients_of
from pipework import Mesh, Pipe

WORKERS = 2
PYTORCH = MappingProxyType(
    {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved-1f1b": "ScheduleInterleaved1F1B",
        "interleaved-zb": "ScheduleInterleavedZeroBubble",
        "zb-v": "ScheduleZBVZeroBubble",
        "dualpipe-v": "ScheduleDualPipeV",
    }
)
"""Our name of a schedule to the class of theirs."""


class Task(Protocol):
    """What is trained; the same in every process."""

    @property
    def chunks(self) -> int:
        """How many micro-batches."""

    def model(self) -> nn.Sequential:
        """With the same values in every process."""

    def batch(self) -> tuple[Tensor, Tensor]:
        """The mini-batch and its target."""

    def loss_of(self, output: Tensor, target: Tensor) -> Tensor:
        """Of a micro-batch; a mean over its rows."""

    def balance(self, schedule: str) -> list[int]:
        """The layers of each stage."""

    def placement(self, schedule: str) -> tuple[int, ...]:
        """The worker of each stage."""


class Part(Protocol):
    """One process's part of what is measured."""

    def run(self) -> None:
        """Once."""

    def clear(self) -> None:
        """Before each run; not timed if there is a single one."""

    def gradients(self) -> list[tuple[int, Tensor]]:
        """What the last run left, with a number that says where it belongs."""


class PyTorchPart:
    """A schedule of torch.distributed.pipelining.

    The loss is inside, one for each micro-batch: their mean is the loss of the whole batch, as for all candidates.
    """

    def __init__(self, rank: int, task: Task, schedule: str) -> None:
        from torch.distributed import pipelining

        def part_of_loss(output: Tensor, target: Tensor) -> Tensor:
            return task.loss_of(output, target) / task.chunks

        self._is_first = rank == 0
        self._batch, self._target = task.batch()
        model, balance = task.model(), task.balance(schedule)
        ends = [sum(balance[: number + 1]) for number in range(len(balance))]
        own = [stage for stage, worker in enumerate(task.placement(schedule)) if worker == rank]
        self._parts = {stage: model[ends[stage] - balance[stage] : ends[stage]] for stage in own}
        self._is_last = len(ends) - 1 in own
        # It learns the shapes in the first step, which is not timed.
        stages: list[Any] = [
            pipelining.PipelineStage(part, stage, len(balance), torch.device("cpu"))
            for stage, part in self._parts.items()
        ]
        self._schedule: Any = getattr(pipelining, PYTORCH[schedule])(
            stages[0] if len(stages) == 1 else stages, task.chunks, loss_fn=part_of_loss, scale_grads=False
        )

    def run(self) -> None:
        """See `Part`."""
        inputs = (self._batch,) if self._is_first else ()
        self._schedule.step(*inputs, target=self._target if self._is_last else None, return_outputs=False)

    def clear(self) -> None:
        """See `Part`."""
        for part in self._parts.values():
            part.zero_grad()

    def gradients(self) -> list[tuple[int, Tensor]]:
        """See `Part`."""
        return [(stage, each) for stage, part in self._parts.items() for each in gradients_of(part)]


class PipeworkPart:
    """A pipe whose workers are the processes."""

    def __init__(self, mesh: Mesh, task: Task, schedule: str) -> None:
        self._batch, self._target = task.batch()
        balance = task.balance(schedule)
        self._pipe = Pipe(
            task.model(),
            task.chunks,
            "never",
            balance=balance,
            schedule=schedule,
            loss_fn=task.loss_of,
            mesh=mesh,
        )
        ends = [sum(balance[: number + 1]) for number in range(len(balance))]
        self._layers = {
            str(layer): stage for stage, end in enumerate(ends) for layer in range(end - balance[stage], end)
        }

    def run(self) -> None:
        """See `Part`."""
        self._pipe(self._batch, target=self._target).backward()

    def clear(self) -> None:
        """See `Part`."""
        self._pipe.zero_grad()

    def gradients(self) -> list[tuple[int, Tensor]]:
        """See `Part`."""
        return [
            (self._layers[name.partition(".")[0]], parameter.grad)
            for name, parameter in self._pipe.named_parameters()
            if parameter.grad is not None
        ]


class Telling(Part, Protocol):
    """A part that says something of itself, such as its memory."""

    def tell(self) -> Any:
        """Anything that a pickle holds."""


Make = Callable[[Mesh], Mapping[str, Part]]
"""Makes the parts of one process from what `pipework.init()` returned there."""


class Taken(NamedTuple):
    """What a run took.

    Attributes:
        seconds: from the first process's start to the last one's end; both read the same system clock.
        processor: seconds of the cores, of both processes together. Other load on the machine changes it less.
    """

    seconds: float
    processor: float


def hosted_store() -> TCPStore:
    """The store of a job, in this process as in torchrun's: a port that was only looked up may be taken meanwhile."""
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def address_of(store: TCPStore) -> dict[str, str]:
    """The environment in which the ranks of a job find its store."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


class TwoProcesses:
    """The processes, as the benchmark sees them.

    Args:
        make: what they run; called in each of them, so it is sent there as a pickle.
        count: how many processes.
        replicas: of the pipe.
    """

    def __init__(self, make: Make, count: int = WORKERS, replicas: int = 1) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo"])  # imported once, and not in each process
        self._store = hosted_store()
        address = address_of(self._store)
        self._connections = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, replicas, address, make, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def take(self, name: str, runs: int = 1) -> Taken:
        """Runs one part of each process.

        Args:
            name: of what is run.
            runs: how many, one after the other.

        Returns:
            What each of them took in the mean.
        """
        starts, ends, processor = zip(*self._ask("take", name, runs), strict=True)
        return Taken((max(ends) - min(starts)) / runs, sum(processor) / runs)

    def seconds(self, name: str) -> float:
        """Of one run."""
        return self.take(name).seconds

    def gradients(self, name: str) -> list[Tensor]:
        """What the last run left, in the order of the layers."""
        parts = [pair for part in self._ask("gradients", name, 0) for pair in part]
        return [torch.from_numpy(array) for _, array in sorted(parts, key=lambda pair: int(pair[0]))]

    def told(self, name: str) -> list[Any]:
        """What a part of each process says of itself, see `Telling`."""
        return self._ask("tell", name, 0)

    def end(self) -> None:
        """Ends the processes and waits for them."""
        for connection in self._connections:
            connection.send(("end", "", 0))
        for process in self._processes:
            process.join(timeout=30)

    def kill(self) -> None:
        """Makes sure that they have ended."""
        for process in self._processes:
            process.kill()

    def _ask(self, action: str, name: str, runs: int) -> list[Any]:
        for connection in self._connections:
            connection.send((action, name, runs))
        return [connection.recv() for connection in self._connections]


@contextmanager
def two_processes(make: Make, count: int = WORKERS, replicas: int = 1) -> Iterator[TwoProcesses]:
    """Starts the processes, and ends them; see `TwoProcesses`."""
    processes = TwoProcesses(make, count, replicas)
    try:
        yield processes
        processes.end()
    finally:
        processes.kill()


def _serve(rank: int, count: int, replicas: int, address: dict[str, str], make: Make, connection: Any) -> None:
    """Runs in each of the processes: executes commands until the command to end."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ.update({**address, **ranks, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    mesh = pipework.init(dp=replicas)
    assert mesh is not None
    parts = make(mesh)
    gc.disable()  # as while other candidates run
    while (command := connection.recv())[0] != "end":  # blocks without using the core
        action, name, runs = command
        part = parts[name]
        if action == "take":
            gc.collect()
            part.clear()
            begun, start = time.process_time(), time.perf_counter()
            part.run()
            for _ in range(runs - 1):
                part.clear()
                part.run()
            end = time.perf_counter()
            connection.send((start, end, time.process_time() - begun))
        elif action == "tell":
            connection.send(part.tell())
        else:
            connection.send([(stage, each.numpy()) for stage, each in part.gradients()])
    parts = {}
    part = None
    torch.distributed.destroy_process_group()
