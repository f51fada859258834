"""Row 23 of the fault matrix: threads, file descriptors, tensors and memory stay flat."""

import gc
import os
import resource
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe
from tests.conftest import USUAL


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


def pipe_of(way: Any, checkpoint: str = "except_last") -> Pipe:
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), Sometimes(), nn.Linear(64, 64))
    return way.pipe(module, 4, checkpoint, balance=[1, 1, 1, 1])


@pytest.mark.parametrize(
    ("way", "checkpoint"),
    [
        pytest.param("interleaved-1f1b", "except_last", marks=pytest.mark.thorough),
        *(pytest.param(way, "never", marks=pytest.mark.slow) for way in ("outside", "interleaved-1f1b")),
        *(pytest.param(way, "except_last", marks=pytest.mark.slow) for way in ("outside", "1f1b", "looped-bfs")),
    ],
    indirect=["way"],
)
def test_a_thousand_steps_leave_nothing(way: Any, checkpoint: str) -> None:
    pipe, x, y = pipe_of(way, checkpoint), torch.randn(64, 64), torch.randn(64)

    def steps(count: int) -> None:
        for _ in range(count):
            way.loss(pipe, x, y).backward()
            pipe.zero_grad()

    steps(100)
    before, resident = inventory(), resident_bytes()
    steps(900)
    assert inventory() == before
    assert resident_bytes() < resident * 1.02


@pytest.mark.parametrize(
    "way", [USUAL[0], *(pytest.param(way, marks=pytest.mark.slow) for way in USUAL[1:])], indirect=True
)
def test_a_hundred_failed_steps_and_pipes_that_come_and_go_leave_nothing(way: Any) -> None:
    pipe, x, y = pipe_of(way), torch.randn(64, 64), torch.randn(64)

    def failing_step() -> None:
        pipe[2].fail = True
        with pytest.raises(ArithmeticError):
            way.loss(pipe, x, y)
        pipe[2].fail = False

    for _ in range(5):
        failing_step()
        way.loss(pipe_of(way), x, y).backward()
    before, resident = inventory(), resident_bytes()
    for number in range(100):
        failing_step()
        if number % 2:
            way.loss(pipe_of(way), x, y).backward()
    assert inventory() == before
    assert resident_bytes() < resident * 1.02
