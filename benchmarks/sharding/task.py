"""The model of `sharding`, and the parts of one of its four processes: pipes of pipework and schedules of PyTorch."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.feed_forward import FeedForward
from pipework import Pipe

if TYPE_CHECKING:
    from pipework import Mesh

WORKERS, REPLICAS = 2, 2


@dataclass(frozen=True)
class Task:
    """What is trained on two workers and two replicas.

    Attributes:
        blocks: of the model.
        width: of the model.
        chunks: micro-batches.
        rows: of a micro-batch.
    """

    blocks: int
    width: int
    chunks: int
    rows: int

    def model(self) -> nn.Sequential:
        """The same model, with the same values, in every process."""
        torch.manual_seed(0)
        return nn.Sequential(*[FeedForward(self.width) for _ in range(self.blocks)])

    def batch(self, replica: int) -> tuple[Tensor, Tensor]:
        """The mini-batch of a replica, and its target."""
        generator = torch.Generator().manual_seed(1 + replica)
        shape = self.rows * self.chunks, self.width
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    @property
    def worker_bytes(self) -> int:
        """The weights of one worker, half of the model's."""
        block = 8 * self.width**2 + 7 * self.width
        return 4 * block * self.blocks // WORKERS

    @property
    def message_bytes(self) -> int:
        """That a stage sends forward, and gets back, for each micro-batch."""
        return 4 * self.rows * self.width


class Memory:
    """The resident memory of this process, in bytes; large blocks are given back to the system at once."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL("libc.so.6")
        self._libc.mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD
        self._empty = 0
        self.settle()
        self._empty = self.now()

    def settle(self) -> None:
        """Forgets the peak so far."""
        gc.collect()
        self._libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def now(self) -> int:
        """Above that of the process without a model."""
        return self._read("VmRSS") - self._empty

    def peak(self) -> int:
        """The most since `settle`."""
        return self._read("VmHWM") - self._empty

    @staticmethod
    def _read(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class ShardedPipe:
    """A pipe of pipework with an optimizer.

    Args:
        mesh: the processes.
        task: what is trained.
        schedule: its name.
        stages: of each worker.
        kind: "replicas", "zero-1" or "fsdp".
        whole_stages: see `Pipe`.
        checkpoint: likewise.
    """

    def __init__(
        self, mesh: Mesh, task: Task, schedule: str, stages: int, kind: str, whole_stages: int | None, checkpoint: str
    ) -> None:
        self._memory = Memory()
        self._batch, self._target = task.batch(mesh.data_parallel_rank)
        model = task.model()
        if kind == "fsdp":
            for layer in model:
                fully_shard(layer, mesh=mesh.device_mesh["dp"])
        count = WORKERS * stages
        self._pipe = Pipe(
            model, task.chunks, checkpoint, balance=[task.blocks // count] * count, schedule=schedule,
            loss_fn=nn.functional.mse_loss, mesh=replace(mesh, whole_stages=whole_stages),
        )  # fmt: skip
        del model
        self._optimizer: Any
        if kind == "zero-1":
            group = mesh.device_mesh["dp"].get_group()
            self._optimizer = ZeroRedundancyOptimizer(
                self._pipe.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3
            )
        else:
            self._optimizer = torch.optim.AdamW(self._pipe.parameters(), lr=1e-3)

    def run(self) -> None:
        """A step without the optimizer's."""
        self._pipe(self._batch, target=self._target).backward()

    def clear(self) -> None:
        """Before a run."""
        self._pipe.zero_grad()

    def gradients(self) -> list[tuple[int, Tensor]]:
        """The parts that are here."""
        return []

    def tell(self) -> dict[str, int]:
        """The bytes between steps, and at the peak of a step with its backward."""
        for _ in range(2):  # the first makes the optimizer's state
            self.clear()
            self._memory.settle()
            self.run()
            peak = self._memory.peak()
            self._optimizer.step()
        self.clear()
        self._memory.settle()
        return {"between": self._memory.now(), "peak": peak}


class PyTorchSchedule:
    """A schedule of torch.distributed.pipelining whose layers FSDP2 shards.

    Args:
        mesh: the processes.
        task: what is trained.
        schedule: the class.
        stages: of each worker.
    """

    def __init__(self, mesh: Mesh, task: Task, schedule: str, stages: int) -> None:
        from torch.distributed import pipelining

        def part_of_loss(output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.mse_loss(output, target) / task.chunks

        self._batch, self._target = task.batch(mesh.data_parallel_rank)
        self._is_first, self._is_last = mesh.worker == 0, mesh.worker == WORKERS - 1
        model, count = task.model(), WORKERS * stages
        size = task.blocks // count
        self._parts = []
        made: list[Any] = []
        for stage in range(mesh.worker, count, WORKERS):
            part = model[stage * size : (stage + 1) * size]
            for layer in part:
                fully_shard(layer, mesh=mesh.device_mesh["dp"])
            fully_shard(part, mesh=mesh.device_mesh["dp"])
            self._parts.append(part)
            group = mesh.device_mesh["pp"].get_group()
            made.append(pipelining.PipelineStage(part, stage, count, torch.device("cpu"), group=group))
        self._schedule: Any = getattr(pipelining, schedule)(
            made[0] if stages == 1 else made, task.chunks, loss_fn=part_of_loss, scale_grads=False
        )

    def run(self) -> None:
        """A step without the optimizer's."""
        inputs = (self._batch,) if self._is_first else ()
        self._schedule.step(*inputs, target=self._target if self._is_last else None, return_outputs=False)

    def clear(self) -> None:
        """Before a run."""
        for part in self._parts:
            part.zero_grad()

    def gradients(self) -> list[tuple[int, Tensor]]:
        """The parts that are here."""
        return []
