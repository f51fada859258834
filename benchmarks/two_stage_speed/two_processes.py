"""torch.distributed.pipelining for `two_stage_speed`: two gloo processes that run a step of any schedule when told to.

They live as long as the benchmark, and block without using their cores while others have their turn.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from benchmarks.two_stage_speed.task import WORKERS, Task, gradients_of, loss_of

SCHEDULES = MappingProxyType(
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


class Rank:
    """One process's part of one schedule.

    The loss is inside, one for each micro-batch: their mean is the loss of the whole batch, as for everyone.
    """

    def __init__(self, rank: int, task: Task, name: str) -> None:
        from torch.distributed import pipelining

        def part_of_loss(output: Tensor, target: Tensor) -> Tensor:
            return loss_of(output, target) / task.chunks

        self.is_first = rank == 0
        self.batch, self.target = task.batch()
        model, balance = task.model(), task.balance(name)
        ends = [sum(balance[: number + 1]) for number in range(len(balance))]
        own = [stage for stage, worker in enumerate(task.placement(name)) if worker == rank]
        self.parts = {stage: model[ends[stage] - balance[stage] : ends[stage]] for stage in own}
        self.is_last = len(ends) - 1 in own
        # It learns the shapes in the first step, which is not timed.
        stages: list[Any] = [
            pipelining.PipelineStage(part, stage, len(balance), torch.device("cpu"))
            for stage, part in self.parts.items()
        ]
        self.schedule: Any = getattr(pipelining, SCHEDULES[name])(
            stages[0] if len(stages) == 1 else stages, task.chunks, loss_fn=part_of_loss, scale_grads=False
        )

    def step(self) -> tuple[float, float]:
        """When it started and ended."""
        for part in self.parts.values():
            part.zero_grad()
        start = time.perf_counter()
        inputs = (self.batch,) if self.is_first else ()
        self.schedule.step(*inputs, target=self.target if self.is_last else None, return_outputs=False)
        return start, time.perf_counter()

    def gradients(self) -> dict[int, list[Any]]:
        """What the last step left on each stage."""
        return {stage: [each.numpy() for each in gradients_of(part)] for stage, part in self.parts.items()}


def serve(rank: int, task: Task, rendezvous: str, connection: Any) -> None:
    """One of the processes: executes commands until told to end."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORKERS)
    parts = {name: Rank(rank, task, name) for name in SCHEDULES}
    while (command := connection.recv()) != "end":  # blocks without using the core
        action, name = command
        connection.send(parts[name].step() if action == "step" else parts[name].gradients())
    dist.destroy_process_group()


class TwoProcesses:
    """Both processes, as the benchmark sees them."""

    def __init__(self, task: Task, rendezvous: str) -> None:
        context = get_context("spawn")
        self._connections = []
        self._processes = []
        for rank in range(WORKERS):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, task, rendezvous, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def step(self, name: str) -> float:
        """From the first process's start to the last one's end; both read the same system clock."""
        starts, ends = zip(*self._ask("step", name), strict=True)
        return max(ends) - min(starts)

    def gradients(self, name: str) -> list[Tensor]:
        """What the last step of that schedule left, in the order of the layers."""
        by_stage = {stage: arrays for part in self._ask("gradients", name) for stage, arrays in part.items()}
        return [torch.from_numpy(array) for stage in sorted(by_stage) for array in by_stage[stage]]

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

    def _ask(self, action: str, name: str) -> list[Any]:
        for connection in self._connections:
            connection.send((action, name))
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
