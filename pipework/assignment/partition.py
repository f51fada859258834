"""Cuts a module into partitions: the number of layers of each partition, and its device."""

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipework.assignment.balance import (
    check_initialised,
    checked_balance,
    estimated_costs,
    not_sequential,
    too_few_devices,
)
from pipework.assignment.devices import Machine, checked_devices, default_devices, usable_device
from pipework.assignment.minimax import minimax_partition
from pipework.model.materialize import materialize_partitions, move
from pipework.model.release import refuse_released
from pipework.model.sequential import Device, WithDevice, named_layers


@dataclass(frozen=True)
class Partitioning:
    """The number of consecutive layers of each partition, and its device.

    Example:
        >>> Partitioning(balance=(2, 1), devices=(torch.device("cpu"), torch.device("cpu"))).balance
        (2, 1)
    """

    balance: tuple[int, ...]
    devices: tuple[torch.device, ...]


def choose_partitioning(
    module: nn.Sequential,
    balance: Sequence[int] | None,
    devices: Sequence[Device] | None,
    *,
    machine: Machine | None = None,
) -> Partitioning:
    """Chooses the number of layers and the device of each partition. It moves nothing.

    * ``balance`` and ``devices`` given: the function takes both, and drops devices that are not needed.
    * ``balance`` alone: the devices are the visible accelerators, or as many CPU workers where there is none.
    * ``devices`` alone: the balance comes from :func:`~pipework.planning.estimated_costs`.
    * Neither, and the layers lie on several devices or are wrapped in :class:`WithDevice`: they stay where they are.
      Consecutive layers on the same device are one partition; layers without parameters join the layer before them.
    * Neither, and all layers lie on one device: the devices are all visible accelerators, or CPU workers where there is
      none (half as many as cores, from 2 to 4), balanced by estimated costs. The choice is logged to ``"pipework"``
      (INFO).

    A layer on the meta device counts as a layer without a device.

    Args:
        module: The layers.
        balance: The number of layers of each partition.
        devices: The device of each partition: ``torch.device``, a name, or an accelerator's index. ``"cpu"`` may
            repeat: each is a worker of its own.
        machine: The devices and cores to choose from; None: those of this process.

    Returns:
        As many devices as partitions; none of either for an empty module.

    Raises:
        TypeError: The module is not an ``nn.Sequential``, or ``balance`` or ``devices`` has a wrong type.
        ValueError: The balance does not fit the layers; a device cannot be used; a layer's parameters lie on several
            devices or have no shape yet (lazy).
        IndexError: There are fewer devices than partitions.

    Example:
        >>> module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        >>> choose_partitioning(module, None, ["cpu", "cpu"])
        Partitioning(balance=(2, 2), devices=(device(type='cpu'), device(type='cpu')))
        >>> choose_partitioning(module, [3, 1], ["cpu", "cpu", "cpu"]).balance
        (3, 1)
    """
    if not isinstance(module, nn.Sequential):
        raise not_sequential(module)
    machine = machine or Machine.here()
    layers = list(module)
    check_initialised(module)
    lies_on = [_device_of(layer) for layer in layers]
    counts = None if balance is None else checked_balance(balance, len(layers))
    places = None if devices is None else checked_devices(devices, machine)
    if not layers:
        return Partitioning((), ())

    if counts is None and places is None and is_placed(module):
        chosen = _where_they_are(layers, lies_on, machine)
    else:
        if places is None:
            places = default_devices(len(layers) if counts is None else len(counts), counts is not None, machine)
        if counts is None:
            counts = minimax_partition(estimated_costs(module), max(1, min(len(places), len(layers))))
        if len(places) < len(counts):
            raise too_few_devices(len(places), len(counts))
        chosen = Partitioning(tuple(counts), tuple(places[: len(counts)]))
        if balance is None and devices is None:
            log_choice(chosen)
    _check_placement(layers, chosen, machine)
    return chosen


def split_layers(
    module: nn.Sequential, partitioning: Partitioning, key: int | None = None, here: Collection[int] | None = None
) -> list[nn.Sequential]:
    """Groups the layers into partitions and moves each to its device, in place.

    Layers (without their :class:`WithDevice`) and parameters stay the same objects and keep their names, so an
    optimizer may be made before or after. A parameter that two partitions share goes to the device of the first.
    Layers on the meta device are initialised one after the other on the device where they will run, so a model may be
    larger than the host's memory. Layers that cannot be initialised stay on the meta device.

    Args:
        module: The layers.
        partitioning: As many layers as the module has, from :func:`choose_partitioning`.
        key: The key of the random values of layers on the meta device; None: drawn from the caller's generator.
        here: The numbers of the partitions that are moved and initialised; None: all.

    Returns:
        One ``nn.Sequential`` for each partition, in the training mode of the module.

    Example:
        >>> module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        >>> first, second = split_layers(module, choose_partitioning(module, [2, 1], ["cpu", "cpu"]))
        >>> list(second.state_dict()), second[0] is module[2]
        (['2.weight', '2.bias'], True)
    """
    children = named_layers(module)
    partitions = []
    start = 0
    for count in partitioning.balance:
        cut = children[start : start + count]
        part = nn.Sequential(OrderedDict((n, each.module if isinstance(each, WithDevice) else each) for n, each in cut))
        part.training = module.training  # the container's flag only: layers keep their own
        partitions.append(part)
        start += count
    stages = [number for number in range(len(partitions)) if here is None or number in here]
    own, devices = [partitions[n] for n in stages], [partitioning.devices[n] for n in stages]
    refuse_released(own)
    materialize_partitions(own, devices, [sum(partitioning.balance[:n]) for n in stages], key)
    for part, device in zip(reversed(own), reversed(devices), strict=True):
        move(part, device)  # in reverse order, so that shared parameters end on the device of the first partition
    return partitions


def partition_model(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[Device] | None = None
) -> nn.Sequential:
    """Groups layers into partitions and moves them to their devices.

    Args:
        module: The layers.
        balance: The number of layers of each partition.
        devices: The device of each partition; by default the visible accelerators, or the CPU where there is none.

    Returns:
        The partitions, an ``nn.Sequential`` of ``nn.Sequential``.

    Raises:
        TypeError: The module is not an ``nn.Sequential``, or ``balance`` or ``devices`` has a wrong type.
        ValueError: The balance does not fit the layers, a device cannot be used, or a layer's parameters lie on several
            devices.
        IndexError: There are fewer devices than partitions.

    Example:
        >>> module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> [len(partition) for partition in partition_model(module, [2, 1], ["cpu", "cpu"])]
        [2, 1]
    """
    return nn.Sequential(*split_layers(module, choose_partitioning(module, balance, devices)))


def _device_of(layer: nn.Module) -> torch.device | None:
    """The device of a layer's parameters; None without parameters, or if all are on the meta device."""
    found = {parameter.device for parameter in layer.parameters()} - {torch.device("meta")}
    if len(found) > 1:
        raise ValueError(
            f"nn.Module: {layer}, should have all parameters on a single device, "
            "please use .to() to place the module on a single device"
        )
    return found.pop() if found else None


def is_placed(module: nn.Sequential) -> bool:
    """Whether the layers lie on several devices already, or one of them is wrapped in ``WithDevice``.

    Example:
        >>> is_placed(nn.Sequential(nn.Linear(2, 2))), is_placed(nn.Sequential(WithDevice(nn.Linear(2, 2), "cpu")))
        (False, True)
    """
    lies_on = {_device_of(layer) for layer in module}
    return any(isinstance(layer, WithDevice) for layer in module) or len(lies_on - {None}) > 1


def _where_they_are(layers: list[nn.Module], lies_on: list[torch.device | None], machine: Machine) -> Partitioning:
    counts: list[int] = []
    devices: list[torch.device] = []
    waiting = 0  # layers without a device at the start: they join the first layer that has one
    for index, (layer, place) in enumerate(zip(layers, lies_on, strict=True)):
        wrapped = isinstance(layer, WithDevice)
        if isinstance(layer, WithDevice):
            place = usable_device(layer.device, f"WithDevice of layer {index}", machine)
        if place is not None and (not devices or place != devices[-1] or (wrapped and place.type == "cpu")):
            devices.append(place)
            counts.append(waiting)
            waiting = 0
        if devices:
            counts[-1] += 1
        else:
            waiting += 1
    return Partitioning(tuple(counts), tuple(devices))


def _check_placement(layers: list[nn.Module], chosen: Partitioning, machine: Machine) -> None:
    targets = [device for count, device in zip(chosen.balance, chosen.devices, strict=True) for _ in range(count)]
    for index, (layer, target) in enumerate(zip(layers, targets, strict=True)):
        if isinstance(layer, WithDevice):
            wanted = usable_device(layer.device, f"WithDevice of layer {index}", machine)
            if wanted != target:
                raise ValueError(
                    f"layer {index} is wrapped in WithDevice for {str(wanted)!r}, but balance= and devices= put it on "
                    f"{str(target)!r}: remove the wrapper, or leave balance= and devices= out"
                )


def log_choice(chosen: Partitioning) -> None:
    """Logs the choice, and how to choose differently, in one line at level INFO."""
    where = [str(device) for device in chosen.devices]
    text = "balance %s on %s: the accelerators that are visible, or else CPU workers; choose with balance= and devices="
    logging.getLogger("pipework").info(text, list(chosen.balance), where)
