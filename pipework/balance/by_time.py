"""Balance by time: each layer's forward and backward, measured."""

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from pipework.balance.checks import check_partitions
from pipework.balance.minimax import minimax_partition
from pipework.balance.sandbox import call, copies, cut, measuring_device, tensors_of, traceless


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensor | tuple[Any, ...],
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Balances the time that the partitions take for forward and backward.

    All layers run in order, again and again until the time is up, and the median of each layer counts. They run on
    copies: parameters, buffers, gradients, training flags, devices and random states stay as they are.

    Args:
        partitions: The number of partitions, from 1 to the number of layers.
        module: The layers.
        sample: Input as a layer will see it: best one micro-batch, since a layer's time need not grow with its rows. A
            tuple is spread into the first layer's positional arguments, unless its ``forward`` takes only one.
        timeout: For how many seconds to measure. There is one pass to warm up and one that counts in any case.
        device: Where to run: by default the current accelerator, else the CPU.

    Returns:
        The number of layers of each partition; the largest time is as small as possible.

    Raises:
        ValueError: The number of partitions is out of range, or a parameter has a gradient, which suggests that
            training is under way: balance before it, or call ``module.zero_grad()``.

    Example:
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> sum(balance_by_time(2, module, torch.zeros(4, 8), timeout=0.01))
        4
    """
    check_partitions(partitions, len(module))
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(f"some parameter already has gradient: {name!r}; call zero_grad() on the module first")
    where = measuring_device(device)
    with traceless(where):
        value = cut(sample, where)
        _pass(module, value, where)  # the first use of a layer allocates, compiles, chooses algorithms
        end = time.perf_counter() + timeout
        passes = [_pass(module, value, where)]
        while time.perf_counter() < end:
            passes.append(_pass(module, value, where))
    return minimax_partition([statistics.median(times) for times in zip(*passes, strict=True)], partitions)


def _pass(module: nn.Sequential, value: Any, device: torch.device) -> list[float]:
    """The seconds that each layer takes. Whole passes, so that what one layer stashes is there for another to pop."""
    times = []
    for layer in copies(module, device):
        start = _now(device)
        output = call(layer, value)
        _backward(layer, value, output)
        times.append(_now(device) - start)
        value = cut(output, device)
    return times


def _backward(layer: nn.Module, value: Any, output: Any) -> None:
    """Backward through this layer alone, even where it uses a tensor that an earlier one has stashed."""
    ends = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    leaves = [tensor for tensor in (*tensors_of(value), *layer.parameters()) if tensor.requires_grad]
    if ends and leaves:
        torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)


def _now(device: torch.device) -> float:
    """The time in seconds, when the device has done all that it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
