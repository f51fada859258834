"""How fast a link carries tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

LARGE: Final = 64 * 2**20
SMALL: Final = 1024
_LARGE_COPIES: Final = 5
_SMALL_COPIES: Final = 20


@dataclass(frozen=True)
class Speed:
    """Measured with `copy_`; a copy ends when both devices have finished it.

    Attributes:
        rates: of the best of five copies of 64 MiB, in GB/s (1e9 bytes); by the kind of the host's memory, "pinned" or
            "pageable", or of "device" memory alone.
        latency: of a copy of 1 KiB, in microseconds, the median of 20; from and to pinned memory of the host.
    """

    rates: Mapping[str, float]
    latency: float

    def __str__(self) -> str:
        rates = ", ".join(
            f"{rate:.3g} GB/s" + ("" if kind == "device" else f" {kind}") for kind, rate in self.rates.items()
        )
        return f"{rates}, {self.latency:.3g} us"


def measure(source: torch.device, destination: torch.device) -> Speed:
    """Copies tensors from one device to another.

    Args:
        source: a device.
        destination: another one, or the same.
    """
    host = [device.type == "cpu" for device in (source, destination)]
    if any(host):
        kinds = {"pageable": False} if all(host) else {"pinned": True, "pageable": False}
    else:
        kinds = {"device": False}
    rates = {
        kind: LARGE / min(_seconds(source, destination, LARGE, pinned, _LARGE_COPIES)) / 1e9
        for kind, pinned in kinds.items()
    }
    small = _seconds(source, destination, SMALL, next(iter(kinds.values())), _SMALL_COPIES)
    return Speed(rates, statistics.median(small) * 1e6)


def _seconds(source: torch.device, destination: torch.device, size: int, pinned: bool, copies: int) -> list[float]:
    """The times of some copies, after one that is not counted."""
    here, there = (
        torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pinned and device.type == "cpu")
        for device in (source, destination)
    )
    accelerators = {device for device in (source, destination) if device.type != "cpu"}
    seconds = []
    for _ in range(copies + 1):
        for device in accelerators:
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        there.copy_(here, non_blocking=True)
        for device in accelerators:
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
