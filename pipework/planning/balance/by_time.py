"""Balance by time: measures the forward and the backward of each layer."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipework.assignment.balance import check_partitions, not_a_list, too_few_devices
from pipework.assignment.minimax import minimax_on_devices, minimax_partition
from pipework.model.sequential import tuple_rule
from pipework.planning.balance.sandbox import (
    copies,
    cut,
    entered,
    measuring_device,
    now,
    tensors_of,
    threads_of_a_worker,
    traceless,
)

Device = torch.device | str | int


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensor | tuple[Any, ...],
    *,
    timeout: float = 1.0,
    device: Device | None = None,
    devices: Sequence[Device] | None = None,
) -> list[int]:
    """Balances the time that the partitions take for forward and backward.

    Copies of the layers run in order, repeatedly until the time is up; each layer's cost is its median time.
    Parameters, buffers, gradients, training flags, devices and random states stay as they are.

    Args:
        partitions: The number of partitions, from 1 to the number of layers.
        module: The layers.
        sample: The input, best one micro-batch, since a layer's time need not be proportional to the rows. A tuple is
            spread into the first layer's positional arguments, unless its ``forward`` takes only one.
        timeout: Seconds to measure on each kind of device. There are at least one warm-up pass and one measured pass.
        device: The device to run on; by default the current accelerator, else the CPU.
        devices: Instead of ``device``, the devices that ``Pipe`` will get: one for each partition. Each layer is timed
            on each kind of device among them, so that a slow device gets fewer layers. Several CPU workers get their
            share of the threads each.

    Returns:
        The number of layers of each partition; the largest time is as small as possible.

    Raises:
        ValueError: The number of partitions is out of range, or a parameter has a gradient, which suggests that
            training is under way: balance before it, or call ``module.zero_grad()``. Or both ``device`` and
            ``devices`` are given.
        IndexError: There are fewer devices than partitions.

    Example:
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> sum(balance_by_time(2, module, torch.zeros(4, 8), timeout=0.01, devices=["cpu", "cpu"]))
        4
    """
    check_partitions(partitions, len(module))
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(f"some parameter already has gradient: {name!r}; call zero_grad() on the module first")
    places = _places(partitions, device, devices)
    cpu_workers = sum(place.type == "cpu" for place in places) if devices is not None else 1
    times: dict[str, list[float]] = {}
    for place in places:
        if device_kind(place) not in times:
            with threads_of_a_worker(cpu_workers if place.type == "cpu" else 1):
                times[device_kind(place)] = _layer_times(module, sample, place, timeout)
    if len(times) == 1:
        return minimax_partition(times[device_kind(places[0])], partitions)
    return minimax_on_devices([times[device_kind(place)] for place in places])


def _places(partitions: int, device: Device | None, devices: Sequence[Device] | None) -> list[torch.device]:
    """The device of each partition for the measurement."""
    if devices is None:
        return [measuring_device(device)] * partitions
    if device is not None:
        raise ValueError("give either device=, where everything is timed, or devices=, one for each partition")
    if isinstance(devices, str | int | torch.device):
        raise not_a_list(devices)
    if len(devices) < partitions:
        raise too_few_devices(len(devices), partitions)
    return [measuring_device(place) for place in devices[:partitions]]


def device_kind(place: torch.device) -> str:
    """The kind of a device, on which a layer's time depends: the model of an accelerator, or its type."""
    if place.type in ("cpu", "meta"):
        return place.type
    model = getattr(torch.get_device_module(place), "get_device_name", None)
    return str(model(place)) if model else place.type


def _layer_times(module: nn.Sequential, sample: Any, device: torch.device, timeout: float) -> list[float]:
    """The median seconds that each layer takes on a device."""
    with traceless(device):
        _pass(module, sample, device)  # the first use of a layer allocates, compiles, chooses algorithms
        end = time.perf_counter() + timeout
        passes = [_pass(module, sample, device)]
        while time.perf_counter() < end:
            passes.append(_pass(module, sample, device))
    return [statistics.median(times) for times in zip(*passes, strict=True)]


def _pass(module: nn.Sequential, sample: Any, device: torch.device) -> list[float]:
    """The seconds that each layer takes in a pass over all layers, so that layers can pop what others stash."""
    times = []
    output = sample
    for layer in copies(module, device):
        value = cut(output, device)
        start = now(device)
        output = layer(*tuple_rule(module).arguments(entered(value), layer))
        _backward(layer, value, output)
        times.append(now(device) - start)
    return times


def _backward(layer: nn.Module, value: Any, output: Any) -> None:
    """Backward through this layer alone, even where it uses a tensor that an earlier one has stashed."""
    ends = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    leaves = [tensor for tensor in (*tensors_of(value), *layer.parameters()) if tensor.requires_grad]
    if ends and leaves:
        ones = [torch.ones((), dtype=end.dtype, device=end.device).expand_as(end) for end in ends]
        torch.autograd.grad(ends, leaves, ones, allow_unused=True)
