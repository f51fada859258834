"""Cuts a module into partitions: how many layers each gets, and on which device it runs."""

import logging
import os
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipework.balance.by_parameters import estimated_costs
from pipework.balance.checks import check_initialised, checked_balance, not_a_list, not_sequential, too_few_devices
from pipework.balance.minimax import minimax_partition
from pipework.model.materialize import materialize_partitions, move
from pipework.model.with_device import Device, WithDevice


@dataclass(frozen=True)
class Partitioning:
    """How many consecutive layers each partition has, and its device.

    Example:
        >>> Partitioning(balance=(2, 1), devices=(torch.device("cpu"), torch.device("cpu"))).balance
        (2, 1)
    """

    balance: tuple[int, ...]
    devices: tuple[torch.device, ...]


@dataclass(frozen=True)
class Machine:
    """What this process can run on: its visible accelerators, the index of the current one, and CPU cores."""

    accelerators: tuple[torch.device, ...] = ()
    current: int = 0
    cores: int = 1

    @staticmethod
    def here() -> "Machine":
        """The machine that this process runs on."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return Machine(cores=cores)
        count = torch.accelerator.device_count()
        visible = tuple(torch.device(accelerator.type, index) for index in range(count))
        return Machine(visible, torch.accelerator.current_device_index(), cores)


def choose_partitioning(
    module: nn.Sequential,
    balance: Sequence[int] | None,
    devices: Sequence[Device] | None,
    *,
    machine: Machine | None = None,
) -> Partitioning:
    """Decides how many layers each partition gets, and where it runs. Nothing is moved yet.

    * ``balance`` and ``devices``: as told; devices that are not needed are dropped.
    * ``balance`` alone: on the visible accelerators, or on as many CPU workers where there is none.
    * ``devices`` alone: balanced by :func:`~pipework.balance.estimated_costs`.
    * Neither, and the layers lie on several devices or are wrapped in :class:`WithDevice`: where they are. Consecutive
      layers on the same device are one partition; layers without parameters stay with the layer before them.
    * Neither, and all layers lie on one device: all visible accelerators, or CPU workers where there is none (half as
      many as cores, from 2 to 4), balanced by estimated costs. What was chosen is logged to ``"pipework"`` (INFO).

    Layers on the meta device lie nowhere.

    Args:
        module: The layers.
        balance: The number of layers of each partition.
        devices: The device of each partition: ``torch.device``, a name, or an accelerator's index. ``"cpu"`` may
            repeat: each is a worker of its own.
        machine: What there is to choose from; found out by itself if None.

    Returns:
        As many devices as partitions; none of either for an empty module.

    Raises:
        TypeError: The module is no ``nn.Sequential``, or ``balance`` or ``devices`` is of a wrong type.
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
            log_choice(chosen, machine)
    _check_placement(layers, chosen, machine)
    return chosen


def split_layers(
    module: nn.Sequential, partitioning: Partitioning, key: int | None = None, here: Collection[int] | None = None
) -> list[nn.Sequential]:
    """Groups the layers into partitions and moves each to its device, in place.

    Layers stay the same objects (without their :class:`WithDevice`) under their own names, parameters stay the same
    objects too, so that an optimizer may be made before or after. What two partitions share goes to the first of them.
    Layers on the meta device are initialised where they will run, one after the other, so that a model may be larger
    than the host; those that cannot be stay there.

    Args:
        module: The layers.
        partitioning: As many layers as the module has, from :func:`choose_partitioning`.
        key: What layers on the meta device are initialised from; None: drawn from the caller's generator if needed.
        here: The numbers of those partitions that are moved, and initialised; None: all.

    Returns:
        One ``nn.Sequential`` for each partition, in the training mode of the module.

    Example:
        >>> module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        >>> first, second = split_layers(module, choose_partitioning(module, [2, 1], ["cpu", "cpu"]))
        >>> list(second.state_dict()), second[0] is module[2]
        (['2.weight', '2.bias'], True)
    """
    children = [(name, layer) for name, layer in module._modules.items() if layer is not None]
    partitions = []
    start = 0
    for count in partitioning.balance:
        part = nn.Sequential(OrderedDict((name, _unwrapped(layer)) for name, layer in children[start : start + count]))
        part.training = module.training  # the container's flag only: layers keep their own
        partitions.append(part)
        start += count
    stages = [number for number in range(len(partitions)) if here is None or number in here]
    own, devices = [partitions[n] for n in stages], [partitioning.devices[n] for n in stages]
    materialize_partitions(own, devices, [sum(partitioning.balance[:n]) for n in stages], key)
    for part, device in zip(reversed(own), reversed(devices), strict=True):
        move(part, device)  # the last first, so that the first partition has the last word on what is shared
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
        TypeError: The module is no ``nn.Sequential``, or ``balance`` or ``devices`` is of a wrong type.
        ValueError: The balance does not fit the layers, a device cannot be used, or a layer's parameters lie on several
            devices.
        IndexError: There are fewer devices than partitions.

    Example:
        >>> module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> [len(partition) for partition in partition_model(module, [2, 1], ["cpu", "cpu"])]
        [2, 1]
    """
    return nn.Sequential(*split_layers(module, choose_partitioning(module, balance, devices)))


# ---- what the user gave ----------------------------------------------------------------------------------------------


def checked_devices(devices: Sequence[Device], machine: Machine) -> list[torch.device]:
    """The devices as PyTorch has them, if they are a list of those that this process can use.

    Raises:
        TypeError: It is no list, or has something else in it.
        ValueError: There is no such device here.
    """
    if isinstance(devices, str | int | torch.device):
        raise not_a_list(devices)
    return [_usable(device, f"devices[{index}]", machine) for index, device in enumerate(devices)]


def _usable(device: Device, what: str, machine: Machine) -> torch.device:
    """The device with its index, if this process can use it."""
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise TypeError(f"{what} must be a torch.device, a name or an accelerator's index, got {device!r}")
    kind = machine.accelerators[0].type if machine.accelerators else None
    if isinstance(device, int):
        if not 0 <= device < len(machine.accelerators):
            raise ValueError(f"{what} is {device}, the index of an accelerator, but {_visible(machine)}")
        return machine.accelerators[device]
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{what} is {device!r}, which is no device that PyTorch knows: {error}") from error
    if place.type in ("cpu", "meta"):
        return torch.device(place.type)
    if place.type == kind and place.index is None:
        return machine.accelerators[machine.current]
    if place not in machine.accelerators:
        raise ValueError(f"{what} is {str(place)!r}, but {_visible(machine)}")
    return place


def _visible(machine: Machine) -> str:
    if not machine.accelerators:
        return "no accelerator is available: use 'cpu', which may repeat, or check the driver and PyTorch's build"
    return f"only {', '.join(str(device) for device in machine.accelerators)} and 'cpu' are available"


# ---- what the layers say ---------------------------------------------------------------------------------------------


def _unwrapped(layer: nn.Module) -> nn.Module:
    return layer.module if isinstance(layer, WithDevice) else layer


def _device_of(layer: nn.Module) -> torch.device | None:
    """Where a layer's parameters lie; None without parameters, or if all are on the meta device."""
    found = {parameter.device for parameter in layer.parameters()} - {torch.device("meta")}
    if len(found) > 1:
        raise ValueError(
            f"nn.Module: {layer}, should have all parameters on a single device, "
            "please use .to() to place the module on a single device"
        )
    return found.pop() if found else None


def is_placed(module: nn.Sequential) -> bool:
    """Whether layers lie on several devices already, or say where they are to lie.

    Example:
        >>> is_placed(nn.Sequential(nn.Linear(2, 2))), is_placed(nn.Sequential(WithDevice(nn.Linear(2, 2), "cpu")))
        (False, True)
    """
    lies_on = {_device_of(layer) for layer in module}
    return any(isinstance(layer, WithDevice) for layer in module) or len(lies_on - {None}) > 1


def _where_they_are(layers: list[nn.Module], lies_on: list[torch.device | None], machine: Machine) -> Partitioning:
    counts: list[int] = []
    devices: list[torch.device] = []
    waiting = 0  # layers at the start that have no device of their own: they join the first that has
    for index, (layer, place) in enumerate(zip(layers, lies_on, strict=True)):
        told = isinstance(layer, WithDevice)
        if isinstance(layer, WithDevice):
            place = _usable(layer.device, f"WithDevice of layer {index}", machine)
        if place is not None and (not devices or place != devices[-1] or (told and place.type == "cpu")):
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
            told = _usable(layer.device, f"WithDevice of layer {index}", machine)
            if told != target:
                raise ValueError(
                    f"layer {index} is wrapped in WithDevice for {str(told)!r}, but balance= and devices= put it on "
                    f"{str(target)!r}: remove the wrapper, or leave balance= and devices= out"
                )


# ---- what pipework chooses -------------------------------------------------------------------------------------------


def default_devices(wanted: int, exactly: bool, machine: Machine) -> list[torch.device]:
    """Accelerators if there are any; else CPU workers, all that are wanted or as many as the cores suggest.

    Example:
        >>> default_devices(9, False, Machine(cores=8))
        [device(type='cpu'), device(type='cpu'), device(type='cpu'), device(type='cpu')]
    """
    if machine.accelerators:
        return list(machine.accelerators)
    workers = wanted if exactly else min(wanted, max(2, min(4, machine.cores // 2)))
    return [torch.device("cpu")] * workers


def log_choice(chosen: Partitioning, machine: Machine) -> None:
    """Says what was chosen and how to choose otherwise, in one line at level INFO."""
    if not machine.accelerators:
        advice = "no accelerator is available; choose with balance= and devices="
    elif len(machine.accelerators) == 1:
        advice = "it is the only accelerator; for more partitions make more visible or give devices=['cpu', 'cpu']"
    else:
        advice = "choose with balance= and devices="
    where = [str(device) for device in chosen.devices]
    logging.getLogger("pipework").info("balance %s on %s: %s", list(chosen.balance), where, advice)
