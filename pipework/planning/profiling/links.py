"""Measures how fast values go from one kind of device to another."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from pipework.planning.balance.by_time import device_kind
from pipework.planning.balance.sandbox import now
from pipework.planning.profiles.layer_costs import LinkSpeed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SMALL, _LARGE = 4096, 64 * 2**20
_TIMES = 7
_NO_COPY = 1e15  # bytes per second


def measure_links(places: Sequence[torch.device], report: Callable[[str], None]) -> dict[tuple[str, str], LinkSpeed]:
    """The links between kinds of device, in both directions alike.

    Two devices of a kind stand for all of that kind. With a single one, that several workers share, nothing is copied.
    What a copy to another device of its kind would take is unknown then.

    Args:
        places: the device of each worker.
        report: called with a line for each link.

    Example:
        >>> [ends for ends in measure_links([torch.device("cpu")] * 2, lambda line: None)]
        [('cpu', 'cpu')]
    """
    found: dict[tuple[str, str], LinkSpeed] = {}
    pairs = [*combinations(places, 2), *((place, place) for place in places if place.type == "cpu")]
    # Two different devices before one that stands there twice.
    for sender, receiver in sorted(pairs, key=lambda pair: pair[0] == pair[1]):
        ends = device_kind(sender), device_kind(receiver)
        if ends in found or ends[::-1] in found:
            continue
        speed = _hand_over() if sender == receiver or sender.type == receiver.type == "cpu" else _copy(sender, receiver)
        found[ends] = speed
        size = f"{speed.bytes_per_second:.2g} bytes a second" if speed.bytes_per_second < _NO_COPY else "nothing copied"
        report(f"{ends[0]} to {ends[1]}: {speed.latency:.2g} s and {size}")
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
