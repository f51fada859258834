"""A kernel that waits until a test lets it go on, so that tests of what overlaps need no times."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_library = torch.library.Library("simulated", "DEF")
_library.define("wait_at(Tensor(a!) x, int gate) -> ()")
_library.define("fail(Tensor(a!) x) -> ()")
_gates: dict[int, threading.Event] = {}
_numbers = itertools.count()


@torch.library.impl(_library, "wait_at", "CPU")
def _wait_at(x: Tensor, gate: int) -> None:
    assert _gates[gate].wait(60), "nobody opened the gate"


@torch.library.impl(_library, "fail", "CPU")
def _fail(x: Tensor) -> None:
    raise ArithmeticError("this kernel always fails")


@contextmanager
def closed_gate() -> Iterator[tuple[int, threading.Event]]:
    """The number of a gate that is closed, and the event that opens it; it is opened at the end at the latest."""
    number, event = next(_numbers), threading.Event()
    _gates[number] = event
    try:
        yield number, event
    finally:
        event.set()


def wait_at(x: Tensor, gate: int) -> None:
    """Launches a kernel that writes x, and ends when the gate is open."""
    torch.ops.simulated.wait_at(x, gate)


def fail(x: Tensor) -> None:
    """Launches a kernel that fails."""
    torch.ops.simulated.fail(x)
