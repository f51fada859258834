"""The partitions of `torch.distributed.pipeline.sync`, and the groups of layers that run on one worker here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipework.assignment.devices import Machine, checked_devices, default_devices
from pipework.model.sequential import PipeSequential, WithDevice
from pipework.torch_private import has_hooks

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Group:
    """Consecutive layers.

    Attributes:
        layers: the layers; a nested `nn.Sequential` is replaced by its layers.
        device: the device of the layers.
        placed: whether parameters or `WithDevice` determine the device.
        grouped: whether the layers come from a nested `nn.Sequential`.
        wrapped: whether the layers come from `WithDevice`.
    """

    layers: tuple[nn.Module, ...]
    device: torch.device
    placed: bool
    grouped: bool = False
    wrapped: bool = False


def group(module: nn.Sequential) -> list[Group]:
    """The partitions of the old library, which give the layers their old names.

    Raises:
        ValueError: the parameters of a layer lie on several devices.

    Example:
        >>> [len(each.layers) for each in group(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Tanh())))]
        [1, 2]
    """
    groups: list[Group] = []
    for child in module:
        one = _group_of(child)
        last = groups[-1] if groups else None
        if last is None or last.device != one.device or one.device.type == "cpu":
            groups.append(one)
        else:
            groups[-1] = _joined(last, one)
    return groups


def merged(groups: Iterable[Group]) -> list[Group] | None:
    """The layers of each worker; None if all layers are on the CPU and the groups do not determine the workers.

    Layers without a device join their neighbour, instead of going to the CPU and back.
    """
    groups = list(groups)
    devices = {each.device for each in groups if each.placed}
    freely = devices <= {torch.device("cpu")} and not any(each.wrapped for each in groups)
    if freely and not all(each.grouped for each in groups):
        return None
    workers: list[Group] = []
    waiting: Group | None = None
    for each in groups:
        if not each.placed and workers:
            workers[-1] = _joined(workers[-1], each)
        elif not each.placed:
            waiting = each if waiting is None else _joined(waiting, each)
        elif waiting is not None:
            workers.append(replace(_joined(waiting, each), device=each.device))
            waiting = None
        elif workers and workers[-1].device == each.device and each.device.type != "cpu":
            workers[-1] = _joined(workers[-1], each)
        else:
            workers.append(each)
    return workers or None


def cpu_workers(layers: int) -> list[torch.device]:
    """The devices for layers whose groups do not determine the workers: CPU workers, also beside accelerators.

    Example:
        >>> cpu_workers(1)
        [device(type='cpu')]
    """
    return default_devices(layers, False, Machine(cores=Machine.here().cores))


def _joined(left: Group, right: Group) -> Group:
    return replace(left, layers=left.layers + right.layers, placed=left.placed or right.placed)


def _group_of(child: nn.Module) -> Group:
    wrapped = isinstance(child, WithDevice)
    if isinstance(child, WithDevice):
        (device,) = checked_devices([child.device], Machine.here())  # "cuda" becomes "cuda:0", as parameters have it
        child = child.module.to(device)
    else:
        device = _device_of(child)
    placed = wrapped or next(child.parameters(), None) is not None
    grouped = isinstance(child, nn.Sequential)
    return Group(tuple(_flat(child)), device, placed, grouped, wrapped)


def _flat(child: nn.Module) -> Iterable[nn.Module]:
    """The layers of a nested sequence that only runs them; otherwise the module itself."""
    plain = type(child).forward in (nn.Sequential.forward, PipeSequential.forward)
    if not isinstance(child, nn.Sequential) or not plain or has_hooks(child):
        return (child,)
    return tuple(child)


def _device_of(module: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"nn.Module: {module}, should have all parameters on a single device, please use .to() to place the module "
            "on a single device"
        )
    return devices.pop() if devices else torch.device("cpu")
