"""The device of the benchmark: how fast it can be, how much memory is taken, and when it has ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# FLOP/s of products of dense bfloat16 matrices, as the data sheets have them.
PEAKS = MappingProxyType(
    {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA L4": 121e12}
)


@dataclass(frozen=True)
class Card:
    """A GPU, or the CPU in its place, where tiny models show that the script works and nothing else.

    Attributes:
        device: which.
        peak: FLOP/s of all SMs in bfloat16; None: not known.
    """

    device: torch.device
    peak: float | None

    @classmethod
    def of(cls, name: str, peak_tflops: float | None) -> Card:
        """The card of a name such as "cuda:0" or "cpu".

        Args:
            name: of the device.
            peak_tflops: given by the user.
        """
        device = torch.device(name)
        known = PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return cls(device, known if peak_tflops is None else peak_tflops * 1e12)

    @property
    def is_gpu(self) -> bool:
        """Whether there are streams, graphs and parts."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and values."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    @property
    def sms(self) -> int:
        """How many multiprocessors it has."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count if self.is_gpu else 1

    def facts(self) -> dict[str, Any]:
        """What results say of it."""
        facts: dict[str, Any] = {"device": str(self.device), "peak of bfloat16, FLOP/s": self.peak}
        if self.is_gpu:
            versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
            facts |= {"name": torch.cuda.get_device_name(self.device), "SMs": self.sms, **versions}
        return facts

    def synchronize(self) -> None:
        """Waits until everything that was launched has ended."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def used(self) -> int:
        """Bytes that tensors take now; the largest number from now on is `most_used`."""
        if not self.is_gpu:
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def most_used(self) -> int:
        """The largest number of bytes that tensors have taken since the last call of `used`."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else 0

    def timed(self, run: Callable[..., object], *arguments: Any) -> tuple[float, float]:
        """Seconds of a run, until the device has ended, and until the host has launched it."""
        self.synchronize()
        start = time.perf_counter()
        run(*arguments)
        launched = time.perf_counter()
        self.synchronize()
        return time.perf_counter() - start, launched - start


@contextlib.contextmanager
def same_bits_twice() -> Iterator[None]:
    """Inside, attention is computed by matrix products: the backward of flash attention adds in any order."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
