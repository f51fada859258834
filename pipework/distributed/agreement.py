"""Before any work, all ranks compare what they were started with: versions, schedule, layers, settings.

This is the contract of a pipe: JSON values that must be equal on all ranks. The ranks exchange digests of their
contracts, and the contracts only if digests differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

import torch

import pipework
from pipework.distributed.transport.groups import LostConnectionError, all_gather, any_of
from pipework.schedule import Schedule, ScheduleSpec, to_json
from pipework.values.dtensor import placement_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from pipework.assignment.assignment import Assignment
    from pipework.distributed.transport.groups import Group

_LONGEST: Final = 200  # characters of a value in a message
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


def agree(group: Group, ranks: Sequence[int], mine: Mapping[str, Any]) -> None:
    """Returns if all ranks have equal contracts; else raises the same error on every rank.

    Args:
        group: of the ranks. All of them call this.
        ranks: their numbers in the job.
        mine: the entries that must be equal on all ranks; anything that JSON can express.

    Raises:
        ValueError: the contracts differ; the message shows exactly the entries that do.
        TypeError: JSON cannot express an entry.
        LostConnectionError: a rank is gone.
    """
    text = json.dumps(mine, sort_keys=True).encode()
    if len({*all_gather(group, hashlib.sha256(text).digest())}) > 1:
        contracts = [json.loads(each) for each in all_gather(group, text)]
        with contextlib.suppress(LostConnectionError):
            any_of(group, False)  # this process may end with the error: before, the others must have got its contract
        lines = _differences(dict(zip(ranks, contracts, strict=True)))
        raise ValueError(
            "the ranks were started with different settings, and must have the same:\n"
            + "\n".join(f"  {line}" for line in lines)
        )


def _differences(contracts: Mapping[int, Any]) -> list[str]:
    """A line for each entry that differs: of lists and dicts the first difference alone.

    Example:
        >>> _differences({0: {"chunks": 8}, 1: {"chunks": 4}, 2: {"chunks": 8}})
        ['chunks: 8 on rank 0, 2; 4 on rank 1']
        >>> _differences({0: {"layers": ["Linear", "ReLU"]}, 1: {"layers": ["Linear", "GELU"]}})
        ['layers, first difference at 1: "ReLU" on rank 0; "GELU" on rank 1']
    """
    lines = []
    for key in sorted({key for contract in contracts.values() for key in contract}):
        entries = {rank: dict(_flat(contract[key])) if key in contract else {} for rank, contract in contracts.items()}
        for path in {path: None for entry in entries.values() for path in entry}:
            texts = {rank: entry.get(path, "nothing") for rank, entry in entries.items()}
            if len({*texts.values()}) > 1:
                lines.append(f"{key}{path and f', first difference at {path[1:]}'}: {_having(texts)}")
                break
    return lines


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The values in nested lists and dicts as text, each with its path."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if not pairs:
        yield path, json.dumps(value)
    for key, item in pairs:
        yield from _flat(item, f"{path}.{key}")


def _having(texts: Mapping[int, str]) -> str:
    """The different texts with the ranks that have them."""
    groups: dict[str, list[str]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(str(rank))
    shown = {text: text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in groups}
    return "; ".join(f"{shown[text]} on rank {', '.join(having)}" for text, having in groups.items())
