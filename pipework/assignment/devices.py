"""The devices that this process can use: checks of given devices, and the default choice."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipework.assignment.balance import not_a_list
from pipework.model.sequential import Device


@dataclass(frozen=True)
class Machine:
    """The visible accelerators, the index of the current one, and the number of CPU cores."""

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


def checked_devices(devices: Sequence[Device], machine: Machine) -> list[torch.device]:
    """The devices as ``torch.device`` objects.

    Raises:
        TypeError: The argument is not a list of devices.
        ValueError: This process cannot use a device.
    """
    if isinstance(devices, str | int | torch.device):
        raise not_a_list(devices)
    return [usable_device(device, f"devices[{index}]", machine) for index, device in enumerate(devices)]


def usable_device(device: Device, what: str, machine: Machine) -> torch.device:
    """The device with its index; `what` names the argument in messages.

    Raises:
        TypeError: The argument is not a device.
        ValueError: This process cannot use it.
    """
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
        raise ValueError(f"{what} is {device!r}, which PyTorch does not know: {error}") from error
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


def chosen_devices(devices: Sequence[Device] | None, layers: int) -> list[torch.device]:
    """The given devices; None: those of this machine for so many layers."""
    machine = Machine.here()
    return default_devices(layers, False, machine) if devices is None else checked_devices(devices, machine)


def default_devices(wanted: int, exactly: bool, machine: Machine) -> list[torch.device]:
    """All accelerators; without any, CPU workers.

    Args:
        wanted: The number of workers that there is work for.
        exactly: Whether there must be that many CPU workers. Otherwise there are half as many as cores, from 2 to 4.
        machine: The devices that there are.

    Example:
        >>> default_devices(9, False, Machine(cores=8))
        [device(type='cpu'), device(type='cpu'), device(type='cpu'), device(type='cpu')]
    """
    if machine.accelerators:
        return list(machine.accelerators)
    workers = wanted if exactly else min(wanted, max(2, min(4, machine.cores // 2)))
    return [torch.device("cpu")] * workers
