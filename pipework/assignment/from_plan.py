"""The arguments of a pipe that a plan stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pipework.assignment.partition import not_sequential
from pipework.model.sequential import named_layers
from pipework.planning.layer_costs import LayerInfo
from pipework.planning.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.sequential import Device
    from pipework.schedule import Schedule, ScheduleSpec


def planned_arguments(
    plan: object,
    module: nn.Sequential,
    chunks: int,
    checkpoint: str,
    balance: Sequence[int] | None,
    devices: Sequence[Device] | None,
    schedule: str | Schedule | ScheduleSpec,
    *,
    usual: str = "gpipe",
    on_ranks: bool = False,
) -> tuple[int, list[int], Sequence[Device] | None, Schedule]:
    """What a plan says instead of a pipe's own arguments: chunks, balance, devices and schedule.

    Args:
        plan: of this module.
        module: the layers.
        chunks: as it was given, as are all arguments that the plan decides.
        checkpoint: likewise.
        balance: likewise.
        devices: for a plan that was made elsewhere: the devices of this machine, one for each worker. None: the plan's.
        schedule: likewise.
        usual: the schedule without a plan.
        on_ranks: whether workers are processes, each of which has its own device: then the plan's are left out.

    Raises:
        TypeError: it is no plan, or the module is no `nn.Sequential`.
        ValueError: an argument is given beside the plan, or the plan is for another model.
    """
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan is of type {type(plan).__name__}: wanted a Plan, as pipework.plan(model, sample) or "
            "pipework.plan(profile, devices=...) returns it, or Plan.load(path)"
        )
    if not isinstance(module, nn.Sequential):
        raise not_sequential(module)
    unset = {"chunks": (chunks, 1), "checkpoint": (checkpoint, "except_last"), "balance": (balance, None)}
    for name, (value, default) in {**unset, "schedule": (schedule, usual)}.items():
        if value is not default and value != default:
            raise ValueError(f"{name}= is given beside plan=, which decides it: leave {name}= or plan= out")
    plan.check_model([layer_info(name, layer) for name, layer in named_layers(module)])
    places: Sequence[Device] | None = devices
    if places is None and not on_ranks:
        if not all(map(_is_device, plan.devices)):
            raise ValueError(
                f"the plan is for kinds of device ({', '.join(dict.fromkeys(plan.devices))}), and names no device of "
                f"this machine: give {len(plan.devices)} in the order of the plan's workers, "
                "Pipe(..., plan=plan, devices=[...])"
            )
        places = plan.devices
    if places is not None and len(places) != len(plan.devices):
        raise ValueError(
            f"devices has {len(places)} entries, and the plan has {len(plan.devices)} workers: give one for each, in "
            f"place of {', '.join(plan.devices)}"
        )
    return (plan.chunks, list(plan.balance), places, plan.schedule)


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def layer_info(name: str, layer: nn.Module) -> LayerInfo:
    """What a layer is, for comparing it with that of a profile or plan.

    Example:
        >>> layer_info("0", nn.Linear(2, 2))
        LayerInfo(name='0', type='Linear', weights=24, trained=24, buffers=0)
    """
    parameters = list(layer.parameters())
    return LayerInfo(
        name,
        type(layer).__name__,
        sum(each.nbytes for each in parameters),
        sum(each.nbytes for each in parameters if each.requires_grad),
        sum(each.nbytes for each in layer.buffers()),
    )
