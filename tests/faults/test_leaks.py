"""Row 23 of the fault matrix: threads, file descriptors, tensors and memory stay flat."""

import gc
import os
import resource
import sys
import threading

import pytest
import torch
from torch import nn

from pipework import Pipe


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise ArithmeticError("on purpose")
        return x.tanh()


def inventory() -> tuple[int, int, int]:
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    return tensors, threading.active_count(), descriptors


def resident_bytes() -> int:
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_a_thousand_steps_leave_nothing(checkpoint: str) -> None:
    pipe = Pipe(
        nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)),
        4,
        checkpoint,
        balance=[1, 2],
        devices=["cpu"] * 2,
    )
    x = torch.randn(64, 64)

    def steps(count: int) -> None:
        for _ in range(count):
            pipe(x).sum().backward()
            pipe.zero_grad()

    steps(100)
    before, resident = inventory(), resident_bytes()
    steps(900)
    assert inventory() == before
    assert resident_bytes() < resident * 1.02


def test_a_hundred_failed_steps_leave_nothing() -> None:
    pipe = Pipe(
        nn.Sequential(nn.Linear(64, 64), Sometimes(), nn.Linear(64, 64)), 4, balance=[1, 2], devices=["cpu"] * 2
    )
    x = torch.randn(64, 64)

    def failing_step() -> None:
        pipe[1].fail = True
        with pytest.raises(ArithmeticError):
            pipe(x)
        pipe[1].fail = False

    for _ in range(5):
        failing_step()
    before, resident = inventory(), resident_bytes()
    for _ in range(100):
        failing_step()
    assert inventory() == before
    assert resident_bytes() < resident * 1.02


def test_pipes_that_come_and_go_leave_no_thread() -> None:
    def use_one() -> None:
        Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, balance=[1, 1], devices=["cpu"] * 2)(
            torch.randn(4, 2)
        ).sum().backward()

    use_one()
    before = inventory()
    for _ in range(50):
        use_one()
    assert inventory() == before
