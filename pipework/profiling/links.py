"""Measures how fast values go from one kind of device to another."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import torch

from pipework.balance.sandbox import now
from pipework.planning.profiles.layer_costs import LinkSpeed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SMALL, _LARGE = 4096, 64 * 2**20
_TIMES = 7
_NO_COPY = 1e15  # bytes per second


def measure_links(
    places: Mapping[str, torch.device], report: Callable[[str], None]
) -> dict[tuple[str, str], LinkSpeed]:
    """The links between kinds of device, in both directions alike.

    Args:
        places: a device of each kind.
        report: called with a line for each link.

    Example:
        >>> [ends for ends in measure_links({"cpu": torch.device("cpu")}, lambda line: None)]
        [('cpu', 'cpu')]
    """
    found = {}
    for (one, sender), (other, receiver) in combinations_with_replacement(places.items(), 2):
        speed = _hand_over() if sender.type == receiver.type == "cpu" else _copy(sender, receiver)
        found[one, other] = speed
        report(f"{one} to {other}: {speed.latency:.2g} s and {speed.bytes_per_second:.2g} bytes a second")
    return found


def _hand_over() -> LinkSpeed:
    """Between two threads nothing is copied; the receiver has to wake up."""
    there: queue.SimpleQueue[float] = queue.SimpleQueue()
    back: queue.SimpleQueue[float] = queue.SimpleQueue()

    def answer() -> None:
        while there.get():
            back.put(1.0)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    times = []
    for _ in range(20 * _TIMES):
        start = time.perf_counter()
        there.put(1.0)
        back.get()
        times.append((time.perf_counter() - start) / 2)
    there.put(0.0)
    thread.join()
    return LinkSpeed(statistics.median(times), _NO_COPY)


def _copy(sender: torch.device, receiver: torch.device) -> LinkSpeed:
    """Two sizes, from which latency and speed follow."""
    small, large = (_seconds(sender, receiver, size) for size in (_SMALL, _LARGE))
    return LinkSpeed(small, (_LARGE - _SMALL) / max(large - small, 1e-9))


def _seconds(sender: torch.device, receiver: torch.device, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=sender)
    times = []
    for _ in range(_TIMES):
        now(sender)
        start = now(receiver)
        source.to(receiver, copy=True)
        times.append(now(receiver) - start)
    return statistics.median(times)
