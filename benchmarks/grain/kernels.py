"""The layers of `grain`: they multiply matrices, or sleep, for a given time in both directions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sleeping import Alarm, Sleeper

WIDTH = 256


class Work:
    """One multiplication of matrices, a single operator, which runs without Python's lock.

    Args:
        rows: of the left one; the right one is square.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._left = torch.randn(rows, WIDTH)
        self._right = torch.randn(WIDTH, WIDTH)
        self._product = torch.empty(rows, WIDTH)

    def __call__(self) -> None:
        torch.mm(self._left, self._right, out=self._product)

    @classmethod
    def lasting(cls, seconds: float) -> Work:
        """As many rows as take about that long on this machine."""
        work = cls(32)
        for _ in range(4):
            work = cls(max(1, round(work.rows * seconds / work.seconds())))
        return work

    def seconds(self, repetitions: int = 8) -> float:
        """The seconds of the fastest of some repetitions."""
        times = []
        for _ in range(repetitions):
            start = time.perf_counter()
            self()
            times.append(time.perf_counter() - start)
        return min(times)


class MultiplyFunction(torch.autograd.Function):
    """Identity that multiplies matrices in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Work) -> Tensor:
        ctx.work = work
        work()
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.work()
        return gradient, None


class Worker(nn.Module):
    """A layer that keeps a core busy."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        return MultiplyFunction.apply(x, self.work)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Kernel:
    """A kind of work.

    Attributes:
        name: of it.
        real: it needs a core, so that only as many workers make sense as there are cores.
    """

    name: str
    real: bool

    def layers(self, stages: int, seconds: float) -> tuple[nn.Sequential, Alarm | None]:
        """One layer for each stage, whose forward and backward take that long; and the alarm, if they sleep."""
        if self.real:
            rows = Work.lasting(seconds).rows
            return nn.Sequential(*(Worker(Work(rows)) for _ in range(stages))), None
        alarm = Alarm()
        alarm.calibrate(stages, seconds)
        return nn.Sequential(*(Sleeper(alarm, seconds, seconds) for _ in range(stages))), alarm


MULTIPLYING = Kernel("multiplying", real=True)
SLEEPING = Kernel("sleeping", real=False)
