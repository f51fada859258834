"""Long kernels and overwritten memory: what a missing wait reads is then wrong, not right by luck."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Final

import torch

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pipework.runtime.engine import Engine

_SECONDS: Final = 0.004  # far longer than a kernel of these models, and than a copy of their tensors
_BEFORE_A_CALL: Final = 8  # long kernels: far longer than the host takes from a call to the first layer
_MEASURED_KERNELS: Final = 20
_ROWS: Final = 256
_CYCLES: Final = 200_000
_CHURNED: Final = (1 << 10, 1 << 12, 1 << 14, 1 << 16)  # numbers of elements, as activations and weights here have


class LongKernels:
    """Keeps streams busy; how long a kernel takes is measured once for each device."""

    def __init__(self) -> None:
        self._launches: dict[torch.device, Callable[[], None]] = {}
        self._calls = 0

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Measures the devices, on their current streams."""
        for device in devices:
            if device not in self._launches:
                self._launches[device] = _long_kernel(device)

    def __call__(self, device: torch.device) -> None:
        """Keeps the current stream of a device busy; on the CPU, the thread."""
        self._launches[device]()

    def sometimes(self, device: torch.device) -> None:
        """Every third time: neighbouring micro-batches then differ."""
        self._calls += 1
        if self._calls % 3 == 0:
            self(device)

    def before_a_call(self, device: torch.device) -> None:
        """Keeps the caller's current stream of a device busy until the workers have begun."""
        for _ in range(_BEFORE_A_CALL):
            self(device)

    def on_copy_streams(self, engine: Engine) -> None:
        """Keeps the streams busy on which an engine's links copy."""
        for link in engine.links.values():
            for stream in [] if link is None else link.copy_streams:
                with stream:
                    self(stream.device)


def _long_kernel(device: torch.device) -> Callable[[], None]:
    if device.type == "cpu":
        return lambda: time.sleep(_SECONDS)
    launch = _short_kernel(device)
    launch()
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(_MEASURED_KERNELS):
        launch()
    torch.accelerator.synchronize(device)
    count = max(1, math.ceil(_SECONDS * _MEASURED_KERNELS / (time.perf_counter() - start)))

    def launch_many() -> None:
        for _ in range(count):
            launch()

    return launch_many


def _short_kernel(device: torch.device) -> Callable[[], None]:
    """A kernel that leaves room for others beside it, if the device has one."""
    spin = torch_private.spinning(torch.get_device_module(device))
    if spin is None:
        matrix = torch.ones(_ROWS, _ROWS, device=device)
        torch.accelerator.synchronize(device)  # other streams read it

    def launch() -> None:
        if spin is None:
            torch.mm(matrix, matrix)
            return
        with torch.accelerator.current_stream(device):  # the thread's current device may be another one
            spin(_CYCLES)

    return launch


def churn(devices: Iterable[torch.device]) -> None:
    """Overwrites freed memory: what the caller's streams allocate next is filled with NaN and freed again."""
    for device in devices:
        held = [torch.full((size,), math.nan, device=device) for size in _CHURNED for _ in range(4)]
        del held


@contextlib.contextmanager
def autocast(devices: Iterable[torch.device], enabled: bool) -> Iterator[None]:
    """Autocast to bfloat16 for all kinds of devices among these."""
    with contextlib.ExitStack() as stack:
        for kind in sorted({device.type for device in devices}) if enabled else ():
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
        yield
