"""The settings of a pipe for which a plan stands."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipework.assignment.partition import check_sequential
from pipework.model.checkpoint import AS_SCHEDULED
from pipework.model.parts.leaves import held_by
from pipework.model.sequential import named_layers
from pipework.planning.layer_costs import LayerInfo
from pipework.planning.plan import Plan
from pipework.torch_private import is_wrapper_subclass
from pipework.values.dtensor import is_dtensor

if TYPE_CHECKING:
    from pipework.settings import Settings


def planned(settings: Settings, module: nn.Sequential, *, usual: str = "gpipe") -> Settings:
    """The settings with what a plan says: chunks, checkpoint, balance, devices, schedule and offload.

    The devices stay where they are given, for a plan that was made elsewhere. Where workers are processes, each has its
    own device, and the plan's are left out.

    Args:
        settings: with a plan of this module.
        module: the layers.
        usual: the schedule without a plan.

    Raises:
        TypeError: it is no plan, or the module is no `nn.Sequential`.
        ValueError: what the plan decides is given, too, or the plan is for another model.
    """
    plan, places = settings.plan, settings.devices
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan is of type {type(plan).__name__}: wanted a Plan, as pipework.plan(model, sample) or "
            "pipework.plan(profile, devices=...) returns it, or Plan.load(path)"
        )
    check_sequential(module)
    usually = {"chunks": 1, "checkpoint": "except_last", "balance": None, "schedule": usual, "offload": False}
    for name, default in usually.items():
        if getattr(settings, name) != default:
            raise ValueError(f"{name}= is given beside plan=, which decides it: leave {name}= or plan= out")
    plan.check_model([layer_info(name, layer) for name, layer in named_layers(module)])
    if places is None and settings.mesh is None:
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
    balance, mode = list(plan.balance), AS_SCHEDULED
    return replace(
        settings, chunks=plan.chunks, checkpoint=mode, balance=balance, devices=places, schedule=plan.schedule
    )


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
        getattr(layer, "units_text", name),  # a part of a model is called by the model's units
        type(layer).__name__,
        sum(map(_stored_bytes, parameters)),
        sum(each.nbytes for each in parameters if each.requires_grad),
        sum(each.nbytes for each in layer.buffers()),
    )


def _stored_bytes(parameter: nn.Parameter) -> int:
    """The size of a parameter, with the tensors that another library's class keeps beside the bytes, such as scales."""
    if type(parameter) is nn.Parameter or is_dtensor(parameter):
        return parameter.nbytes
    held = sum(each.nbytes for each in held_by(vars(parameter)))
    return held if is_wrapper_subclass(parameter) else parameter.nbytes + held
