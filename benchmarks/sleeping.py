"""Layers that sleep instead of computing, so that two cores stand for many devices.

A sleeping thread needs neither core nor Python's lock, as one that waits for an accelerator. But a sleep wakes up late:
on Linux by 60 to 100 microseconds, of which 50 are slack that the kernel gives itself to bundle timers. The slack can
be turned off (`without_timer_slack`), and each sleep is asked to end earlier by what is left, measured before with as
many threads. What the layers really slept is kept: on the average it must be what was asked.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn


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


class Nap(torch.autograd.Function):
    """Identity that takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alarm: Alarm, forward: float, backward: float, start: float) -> Tensor:
        ctx.alarm, ctx.seconds = alarm, backward
        alarm.sleep(forward, start)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.alarm.sleep(ctx.seconds)
        return gradient, None, None, None, None


class Sleeper(nn.Module):
    """A layer that computes nothing, slowly."""

    def __init__(self, alarm: Alarm, forward: float, backward: float) -> None:
        super().__init__()
        self.alarm = alarm
        self.seconds = (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(x, self.alarm, *self.seconds, time.perf_counter())  # type: ignore[no-any-return]
