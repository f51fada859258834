"""Layers that sleep instead of computing, so that two cores stand for many devices.

A sleeping thread needs neither a core nor Python's lock, like a thread that waits for an accelerator. But a sleep ends
late: on Linux by 60 to 100 microseconds, of which 50 are slack that the kernel adds to bundle timers. The slack can be
turned off (`without_timer_slack`). Each sleep is shortened by the remaining lateness, which is measured before with as
many threads. The real durations of all sleeps are kept: their mean must be the requested one.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from pipework.autograd.weight_split import store
from pipework.autograd.weight_split.operation import DeferrableAlias, Operation, Parts


def without_timer_slack() -> None:
    """Threads started from now on sleep precisely, if this is Linux."""
    if sys.platform == "linux":
        set_timer_slack = 29  # PR_SET_TIMERSLACK of linux/prctl.h; the argument is in nanoseconds
        ctypes.CDLL(None).prctl(set_timer_slack, 1, 0, 0, 0)


@dataclass
class Alarm:
    """Sleeps as long as asked, and keeps how long it was.

    Attributes:
        lateness: how much later a sleep ends than asked, on the average; subtracted from every one.
        slept: for each sleep (asked, real) seconds.
    """

    lateness: float = 0.0
    slept: list[tuple[float, float]] = field(default_factory=list)

    def sleep(self, seconds: float, start: float | None = None) -> None:
        """Sleeps until `seconds` after `start`, which is when the layer began its work."""
        if seconds <= 0:
            return
        start = time.perf_counter() if start is None else start
        time.sleep(max(0.0, start + seconds - time.perf_counter() - self.lateness))
        self.slept.append((seconds, time.perf_counter() - start))

    def calibrate(self, threads: int, seconds: float, repetitions: int = 40) -> None:
        """Measures the lateness while this many threads sleep, not all in step."""
        self.lateness = 0.0

        def sleep_often(number: int) -> None:
            time.sleep(seconds * number / threads)
            for _ in range(repetitions):
                self.sleep(seconds)

        sleepers = [threading.Thread(target=sleep_often, args=(number,)) for number in range(threads)]
        for sleeper in sleepers:
            sleeper.start()
        for sleeper in sleepers:
            sleeper.join()
        late = sorted(real - asked for asked, real in self.slept)
        # A mean, since it is sums that count; without the latest quarter, in which other processes may have had a part:
        # too much subtracted would make a pipe look faster than it can be.
        self.lateness = mean(late[: max(1, len(late) * 3 // 4)])
        self.slept.clear()


@dataclass(frozen=True)
class Times:
    """Seconds that a layer sleeps in a forward, in a backward, and, of this, for its weight."""

    forward: float
    backward: float
    weight: float


class SleepFunction(torch.autograd.Function):
    """Identity that sleeps in both directions."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, alarm: Alarm, forward: float, backward: float, start: float
    ) -> Tensor:
        ctx.alarm, ctx.seconds, ctx.weight = alarm, backward, weight
        alarm.sleep(forward, start)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.alarm.sleep(ctx.seconds)
        of_weight = torch.zeros_like(ctx.weight) if ctx.needs_input_grad[1] else None
        return gradient, of_weight, None, None, None, None


def sleep(x: Tensor, weight: Tensor, alarm: Alarm, times: Times, start: float) -> Tensor:
    """An operator with one parameter that sleeps instead of computing; its forward began at `start`."""
    if has_torch_function((weight,)):
        return handle_torch_function(sleep, (weight,), x, weight, alarm, times, start)  # type: ignore[no-any-return]
    return SleepFunction.apply(x, weight, alarm, times.forward, times.backward, start)  # type: ignore[no-any-return,no-untyped-call]


class _SplitSleep(Operation):
    """The same operator with a split backward: the weight's share is slept in W."""

    name = "sleep"

    def __init__(self, x: Tensor, weight: DeferrableAlias, alarm: Alarm, times: Times, start: float) -> None:
        self.kept, self.parameters = x, (weight,)
        self.alarm, self.times, self.start = alarm, times, start

    def run(self) -> Tensor:
        backward = self.times.backward - self.times.weight
        weight = self.parameters[0].plain
        return SleepFunction.apply(self.kept, weight, self.alarm, self.times.forward, backward, self.start)  # type: ignore[no-any-return,no-untyped-call]

    def run_whole(self) -> Tensor:
        return sleep(self.kept, self.parameters[0], self.alarm, self.times, self.start)

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        self.alarm.sleep(self.times.weight)
        return ((self.parameters[0], torch.zeros(self.parameters[0].sizes)),)


@contextmanager
def sleeping_in_halves() -> Iterator[None]:
    """Registers the sleeping operator among those whose backward is split."""
    operators = store.OPERATORS
    store.OPERATORS = MappingProxyType({**operators, sleep: _SplitSleep})  # type: ignore[misc]
    try:
        yield
    finally:
        store.OPERATORS = operators  # type: ignore[misc]


class Sleeper(nn.Module):
    """A layer that sleeps instead of computing.

    Args:
        alarm: sleeps, and keeps the durations.
        forward: seconds.
        backward: seconds.
        weight_share: the share of a backward for the weight, which a W sleeps.
    """

    def __init__(self, alarm: Alarm, forward: float, backward: float, weight_share: float = 0.0) -> None:
        super().__init__()
        self.alarm = alarm
        self.times = Times(forward, backward, weight_share * backward)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return sleep(x, self.weight, self.alarm, self.times, time.perf_counter())
