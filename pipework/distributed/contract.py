"""The contract of a pipe: JSON values that must be equal in all processes, compared before any work."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import torch

import pipework
from pipework.schedule import Schedule, ScheduleSpec, to_json
from pipework.values.dtensor import placement_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from pipework.assignment.assignment import Assignment


_PLACE: Final = "_pipework_place"
_TAKEN: Final = (
    "places that the layers have in a pipe that was made before (it has those of its own process only: make the next "
    "Pipe of the whole model that it was made of, or make the model again and load a checkpoint)"
)


def note_places(partitions: Iterable[nn.Sequential]) -> None:
    """Notes on each layer of a pipe where it is among those of all processes, for the contract of another pipe.

    Its modules have the note, too, of which another layer may be made, and so has a copy.
    """
    for place, layer in enumerate([layer for partition in partitions for layer in partition]):
        for module in layer.modules():
            module.__dict__[_PLACE] = place


def contract(module: nn.Sequential, assignment: Assignment, **settings: Any) -> dict[str, Any]:
    """Versions, assignment, layers, the dtypes and shapes of parameters and buffers, and settings.

    The values of parameters are not compared: a rank drops those of other ranks' layers. `requires_grad` is not
    compared: in the layers of other ranks it has no effect, and it may change between two steps. Where it matters,
    for replicas and for tied parameters, each step compares it.

    Example:
        >>> from torch import nn
        >>> from pipework.assignment.assignment import assign
        >>> module = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> agreed = contract(module, assign(module, "gpipe", 1, [1, 1], ["cpu", "cpu"]), chunks=1)
        >>> agreed["layers"], agreed["parameters"]["0.weight"]
        (['0: Linear', '1: ReLU'], 'torch.float32 (3, 2)')
        >>> layer = nn.Linear(2, 2)
        >>> tied = nn.Sequential(layer, layer)
        >>> contract(tied, assign(tied, "gpipe", 1, [1, 1], ["cpu", "cpu"]))["parameters"]["1.bias"]
        'torch.float32 (2,), tied to 0.bias'
    """
    schedule = assignment.source
    if isinstance(schedule, ScheduleSpec):
        schedule = assignment.schedule(settings["chunks"])
    if isinstance(schedule, Schedule):  # a named schedule follows from the version; this one may differ
        schedule = f"{schedule.name}, orders {hashlib.sha256(to_json(schedule).encode()).hexdigest()[:16]}"
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names: dict[int, str] = {}  # of each tensor, the first
    inside = [{each.__dict__[_PLACE] for each in layer.modules() if _PLACE in each.__dict__} for layer in module]
    places = [next(iter(each)) if len(each) == 1 else sorted(each) for each in inside]
    return {
        **({_TAKEN: places} if any(inside) else {}),
        "pipework": pipework.__version__,
        "torch": torch.__version__,
        "schedule": schedule,
        "balance": list(assignment.partitioning.balance),
        "placement": list(assignment.placement),
        "layers": [f"{name}: {type(layer).__qualname__}" for name, layer in module.named_children()],
        "parameters": {
            name: f"{tensor.dtype} {tuple(tensor.shape)}"
            + (f", {placed}" if (placed := placement_text(tensor)) else "")
            + ("" if names.setdefault(id(tensor), name) == name else f", tied to {names[id(tensor)]}")
            for name, tensor in tensors
        },
        **settings,
    }
