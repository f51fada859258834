"""Automatic balance: the number of consecutive layers of each partition, by their measured time or memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipework.assignment.minimax import check_partitions, minimax_on_devices, minimax_partition
from pipework.assignment.partition import Machine, check_sequential, checked_devices, too_few_devices
from pipework.model import mini_batch
from pipework.model.sequential import tuple_rule
from pipework.planning.measuring.links import device_kind
from pipework.planning.measuring.profile import profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipework.model.sequential import Device
    from pipework.planning.profiles import Profile


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

    A copy of each layer runs repeatedly; its cost is the median time. Parameters, buffers, gradients, training flags,
    devices and random states stay as they are.

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
        TypeError: The module is no ``nn.Sequential``.
        ValueError: The number of partitions is out of range, or a parameter has a gradient, which suggests that
            training is under way: balance before it, or call ``module.zero_grad()``. Or both ``device`` and
            ``devices`` are given.
        IndexError: There are fewer devices than partitions.

    Example:
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> sum(balance_by_time(2, module, torch.zeros(4, 8), timeout=0.01, devices=["cpu", "cpu"]))
        4
    """
    check_sequential(module)
    check_partitions(partitions, len(module))
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(f"some parameter already has gradient: {name!r}; call zero_grad() on the module first")
    if device is not None and devices is not None:
        raise ValueError("give either device=, where everything is timed, or devices=, one for each partition")
    places = [_measuring_device(device)] * partitions if devices is None else checked_devices(devices, Machine.here())
    if len(places) < partitions:
        raise too_few_devices(len(places), partitions)
    places = places[:partitions]
    found = _profile(module, sample, places[:1] if devices is None else places, timeout / len(module))
    times = {kind: [sum(layer) for layer in each.seconds[0]] for kind, each in found.kinds.items()}
    return minimax_on_devices([times[device_kind(place)] for place in places])


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Tensor | tuple[Any, ...],
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Balances the memory of the partitions.

    A layer's size is ``bytes of its parameters * param_scale + bytes of its activations for one micro-batch``.
    Activations are what the layer's graph holds for the backward, and the layer's output. Each piece of memory counts
    once, for the layer that makes it. Copies of the layers run forward and backward: parameters, buffers, gradients,
    training flags, devices and random states stay as they are.

    Args:
        partitions: The number of partitions, from 1 to the number of layers.
        module: The layers.
        input: One mini-batch. A tuple is spread into the first layer's positional arguments, unless its ``forward``
            takes only one.
        chunks: The number of micro-batches of the mini-batch; the first one, which is the largest, is measured.
        param_scale: The number of copies of each parameter: 2 for the parameter and its gradient, 3 with a momentum, 4
            with the two moments of Adam; add 1 for the gradient buffer of a training step.
        device: The device to run on; by default the current accelerator, else the CPU. On ``"meta"`` nothing is
            computed.

    Returns:
        The number of layers of each partition; the largest size is as small as possible.

    Raises:
        TypeError: The module is no ``nn.Sequential``.
        ValueError: The number of partitions or of chunks, or the scale, is out of range.

    Example:
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.Linear(8, 32))
        >>> balance_by_size(2, module, torch.zeros(4, 8), device="meta")
        [3, 1]
    """
    check_sequential(module)
    check_partitions(partitions, len(module))
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    if param_scale < 0:
        raise ValueError(f"param_scale must not be negative, got {param_scale}")
    found = _profile(module, input, [_measuring_device(device)], 0.0, chunks)
    sizes = [
        layer.weights * param_scale + size.kept + size.output_kept
        for layer, size in zip(found.layers, found.bytes[0], strict=True)
    ]
    sizes[0] += found.bytes[0][0].input  # that of a later layer is made by the layer before
    return minimax_partition(sizes, partitions)


def _measuring_device(device: Device | None) -> torch.device:
    """The given device, else the current accelerator, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _profile(
    module: nn.Sequential, sample: Any, places: list[torch.device], timeout: float, chunks: int = 1
) -> Profile:
    """The layers, for the largest of some micro-batches."""
    inputs = tuple_rule(module).arguments(sample, module[0])
    rows = sum(mini_batch.split(inputs, {}, 1).rows)
    return profile(module, inputs, devices=places, rows=[-(-rows // chunks)], timeout=timeout)
