"""Cuts a module into partitions: the devices that there are, the number of layers of each partition, and its device."""

from __future__ import annotations

import operator
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipework.assignment.minimax import minimax_partition
from pipework.model.materialize import materialize_partitions, move
from pipework.model.release import refuse_released
from pipework.model.sequential import Device, WithDevice, named_layers
from pipework.schedule.argument_checks import positive_integers


@dataclass(frozen=True)
class Machine:
    """The visible accelerators, the index of the current one, and the number of CPU cores."""

    accelerators: tuple[torch.device, ...] = ()
    current: int = 0
    cores: int = 1

    @staticmethod
    def here() -> Machine:
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
        raise TypeError(
            f"devices must be a list with the device of each partition, got {devices!r}: write such as ['cpu', 'cpu'] "
            "for two workers on the CPU, or [0, 1] for two accelerators"
        )
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


def chosen_devices(devices: Sequence[Device] | None, layers: int, workers: int | None = None) -> list[torch.device]:
    """The given devices; None: those of this machine for so many workers, or layers."""
    machine = Machine.here()
    if workers is not None:
        positive_integers(workers=workers)
        found = default_devices(workers, True, machine)[:workers] if devices is None else devices
        if len(found) != workers:
            raise ValueError(f"workers is {workers}, and there are {len(found)} devices: give one for each worker")
        devices = found
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


def check_sequential(module: object) -> None:
    """Raises ``TypeError`` unless the module is an ``nn.Sequential``."""
    if isinstance(module, nn.Sequential):
        return
    got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
    advice = "write nn.Sequential(*layers), or keep the model and take pipework.attach(model, sample, ...)"
    if hasattr(module, "partitions"):
        advice = "it is one already, so pass its layers, nn.Sequential(*layers)"
    raise TypeError(f"module must be nn.Sequential to be partitioned, got {got}: {advice}")


def too_few_devices(devices: int, partitions: int, what: str = "partitions") -> IndexError:
    """The error for fewer devices than partitions, or than workers if these hold several partitions."""
    return IndexError(
        f"too few devices to hold given partitions (devices: {devices}, {what}: {partitions}): give {partitions} "
        f"devices, such as devices=['cpu'] * {partitions}"
    )


def check_initialised(module: nn.Module) -> None:
    """Raises ``ValueError`` if a lazy parameter has no shape yet."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} is lazy and has no shape yet: run one batch through the module first, "
                "for example module(sample)"
            )


def checked_balance(balance: Sequence[int], layers: int) -> list[int]:
    """The balance as a list of positive integers that sum to the number of layers.

    Raises:
        TypeError: The balance is not a sequence, or is a string.
        ValueError: The balance does not fit the layers; the message shows how to find one that fits.
    """
    is_list = isinstance(balance, Iterable) and not isinstance(balance, str | bytes)
    given = list(balance) if is_list else []
    try:
        counts = [0 if isinstance(count, bool) else operator.index(count) for count in given]
    except TypeError:
        counts = [0]
    positive = is_list and all(count >= 1 for count in counts)
    if positive and sum(counts) == layers:
        return counts
    error = ValueError if is_list else TypeError
    raise error(
        f"balance must be positive integers that sum to {layers}, the number of layers, got "
        f"{given if is_list else repr(balance)}{f', which sums to {sum(counts)}' if positive else ''}. "
        "Let pipework measure one, with sample = one batch of input:\n\n"
        "    from pipework import balance_by_time\n"
        f"    balance = balance_by_time({max(1, min(len(given), layers))}, module, sample)\n"
    )


def estimated_costs(module: nn.Module) -> list[float]:
    """Estimates the cost of each layer, well enough to balance a transformer or a perceptron.

    A layer costs the number of parameter elements that take part in its arithmetic, plus 1 for each of its innermost
    modules. Matrix products take most of the time, and their work for one row or token is proportional to the elements
    of the matrix. Embedding tables are looked up rather than multiplied, so they cost only the 1. The estimate ignores
    the input: attention over long sequences and convolutions over large images cost more than it says. Use
    :func:`balance_by_time` for them.

    Args:
        module: Its children are the layers, as in ``nn.Sequential``.

    Returns:
        A cost for each layer, without a unit: only the ratios have a meaning.

    Raises:
        ValueError: A parameter of a lazy module has no shape yet.

    Example:
        >>> estimated_costs(nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 8), nn.ReLU()))
        [1.0, 41.0, 1.0]
    """
    check_initialised(module)
    return [float(sum(map(_own_cost, layer.modules()))) for layer in module._modules.values() if layer is not None]


def _own_cost(module: nn.Module) -> int:
    innermost = 0 if any(True for _ in module.children()) else 1
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return innermost
    return innermost + sum(parameter.numel() for parameter in module.parameters(recurse=False))


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
    * ``devices`` alone: the balance comes from :func:`estimated_costs`.
    * Neither, and the layers lie on several devices or are wrapped in :class:`WithDevice`: they stay where they are.
      Consecutive layers on the same device are one partition; layers without parameters join the layer before them.
    * Neither, and all layers lie on one device: the devices are all visible accelerators, or CPU workers where there is
      none (half as many as cores, from 2 to 4), balanced by estimated costs.

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
    check_sequential(module)
    machine = machine or Machine.here()
    layers = list(module)
    check_initialised(module)
    lies_on = [_device_of(layer) for layer in layers]
    counts = None if balance is None else checked_balance(balance, len(layers))
    places = None if devices is None else checked_devices(devices, machine)
    if not layers:
        return Partitioning((), ())

    wanted = [
        usable_device(layer.device, f"WithDevice of layer {index}", machine) if isinstance(layer, WithDevice) else None
        for index, layer in enumerate(layers)
    ]
    if counts is None and places is None and is_placed(module):
        return _where_they_are(lies_on, wanted)
    if places is None:
        places = default_devices(len(layers) if counts is None else len(counts), counts is not None, machine)
    if counts is None:
        counts = minimax_partition(estimated_costs(module), max(1, min(len(places), len(layers))))
    if len(places) < len(counts):
        raise too_few_devices(len(places), len(counts))
    targets = [device for count, device in zip(counts, places, strict=False) for _ in range(count)]
    for index, (device, target) in enumerate(zip(wanted, targets, strict=True)):
        if device is not None and device != target:
            raise ValueError(
                f"layer {index} is wrapped in WithDevice for {str(device)!r}, but balance= and devices= put it on "
                f"{str(target)!r}: remove the wrapper, or leave balance= and devices= out"
            )
    return Partitioning(tuple(counts), tuple(places[: len(counts)]))


def grouped(layers: Sequence[tuple[str, nn.Module]], balance: Sequence[int]) -> list[nn.Sequential]:
    """A module for each stage, with so many layers, which keep their names.

    Example:
        >>> [list(stage._modules) for stage in grouped([("0", nn.ReLU()), ("1", nn.ReLU()), ("2", nn.ReLU())], [1, 2])]
        [['0'], ['1', '2']]
    """
    ends = accumulate(balance, initial=0)
    return [nn.Sequential(OrderedDict(layers[begin:end])) for begin, end in pairwise(ends)]


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
    layers = [(name, each.module if isinstance(each, WithDevice) else each) for name, each in named_layers(module)]
    partitions = grouped(layers, partitioning.balance)
    for part in partitions:
        part.training = module.training  # the container's flag only: layers keep their own
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


def _where_they_are(lies_on: list[torch.device | None], wanted: list[torch.device | None]) -> Partitioning:
    """A partition begins at each change of the device, and at each layer that is wrapped for a CPU worker."""
    begins: list[int] = []
    devices: list[torch.device] = []
    for index, (found, wrapped) in enumerate(zip(lies_on, wanted, strict=True)):
        place = wrapped or found
        if place is not None and (place not in devices[-1:] or (wrapped is not None and place.type == "cpu")):
            begins.append(index)
            devices.append(place)
    # Layers without a device at the start join the first layer that has one.
    ends = [0, *begins[1:], len(lies_on)]
    return Partitioning(tuple(end - begin for begin, end in pairwise(ends)), tuple(devices))
