"""Parts of one GPU as the devices of workers: streams of disjoint sets of its multiprocessors (SMs).

CUDA calls them green contexts. With them a single card shows how the workers of a pipe overlap: each computes on SMs of
its own, while two ordinary streams of one card wait for each other's kernels. Memory, its bandwidth and the power of
the card are shared. All workers of a pipe must have such a stream: with ordinary ones among them, values were wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipework import Pipe

_MULTIPLE = 8  # SMs come in groups of so many


@dataclass(frozen=True)
class Part:
    """A part of the card.

    Attributes:
        stream: what is launched into it runs on these SMs only.
        sms: how many SMs there are.
    """

    stream: torch.cuda.Stream
    sms: int


def split(count: int) -> list[Part]:
    """Cuts the first GPU into equal parts, which live as long as the process.

    Args:
        count: how many.

    Raises:
        ImportError: cuda-bindings is not installed.
        RuntimeError: the driver does not do it.
    """
    from cuda.bindings import driver

    torch.zeros(1, device="cuda:0")  # PyTorch makes the context of which these are parts
    device = _done(driver.cuDeviceGet(0))
    every = _done(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    sms = every.sm.smCount // count // _MULTIPLE * _MULTIPLE
    groups, *_ = _done(driver.cuDevSmResourceSplitByCount(count, every, 0, sms))
    parts = []
    for group in groups[:count]:
        description = _done(driver.cuDevResourceGenerateDesc([group], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = _done(driver.cuGreenCtxCreate(description, device, flags))
        stream = _done(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        parts.append(Part(torch.cuda.ExternalStream(int(stream), device=0), group.sm.smCount))
    return parts


def compute_on(pipe: Pipe, parts: Sequence[Part]) -> None:
    """Gives each worker of a pipe, whose workers all are on the first GPU, the stream of a part; before its first call.

    Args:
        pipe: with as many workers as there are parts.
        parts: of different workers.
    """
    engine = pipe._executor.engine_in_use()
    devices = list(engine.devices.values())
    for device, part in zip(devices, parts, strict=True):
        device.stream = part.stream
    # The threads, or the only one, have made the former streams their current ones.
    jobs = [device.enter_thread for device in devices[: len(engine.workers._threads)]]
    engine.workers.run(jobs, interrupted=lambda error: None)
    torch.accelerator.synchronize()  # what was made in the former streams is there


def _done(result: Any) -> Any:
    """What a call of the driver gives beside its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"the driver does not cut the GPU into parts: {status}")
    return values[0] if len(values) == 1 else values
