"""The model and mini-batch of all candidates of `two_stage_speed`, and the ideal step of each schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.two_processes import WORKERS
from pipework.schedule import Costs, Schedule, build, schedule_spec, simulate


@dataclass(frozen=True)
class Task:
    """A transformer of equal blocks, and a mini-batch for it."""

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

    def batch(self) -> tuple[Tensor, Tensor]:
        """The same mini-batch and target, in every process."""
        shape = (self.rows * self.chunks, self.tokens, self.width)
        generator = torch.Generator().manual_seed(1)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def loss_of(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean square of the difference."""
        return nn.functional.mse_loss(output, target)

    def balance(self, schedule: str) -> list[int]:
        """As many blocks for each stage of the schedule."""
        stages = WORKERS * schedule_spec(schedule).stages_per_worker
        return [self.blocks // stages] * stages

    def placement(self, schedule: str) -> tuple[int, ...]:
        """The worker of each stage."""
        return self._built(schedule).placement

    def splits(self, schedule: str) -> bool:
        """Whether it has backwards in two halves."""
        return bool(self._built(schedule).split_stages)

    def _built(self, schedule: str) -> Schedule:
        return build(schedule, workers=WORKERS, chunks=self.chunks)

    def ideal(self, schedule: str, costs: Costs | None = None) -> float:
        """The simulated step.

        Args:
            schedule: its name.
            costs: of equal stages, in seconds, as is the result. None: backwards take twice as long as forwards, their
                halves as long, and the result is a share of the one-core time.
        """
        order = self._built(schedule)
        if costs is not None:
            return simulate(order, costs).makespan
        costs = Costs(forward=1 / order.stages, backward=2 / order.stages)
        return simulate(order, costs).makespan / (3 * self.chunks)
