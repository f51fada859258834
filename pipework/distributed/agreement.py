"""Before any work, all ranks compare what they were started with: versions, schedule, layers, settings.

This is the contract of a pipe: JSON values that must be equal on all ranks. Each rank publishes its contract, under its
digest and compressed, so that ranks with the same contract publish one text; and then the digest. The contracts are
read only if digests differ.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import time
import zlib
from typing import TYPE_CHECKING, Any, Final

import torch

import pipework
from pipework.distributed.health.store_client import StoreClient
from pipework.schedule import Schedule, ScheduleSpec, to_json
from pipework.values.dtensor import placement_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.distributed.distributed_c10d import Store

    from pipework.assignment.assignment import Assignment

_MOST_SENT: Final = 4_000_000  # bytes; a TCPStore takes 8 MB, and closes the connection of a client that sends more
_POLL: Final = 0.02  # seconds
_SETTLE: Final = 2.0  # seconds to wait for other ranks once digests differ, and until they have read the contracts
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


def agree(
    store: Store,
    rank: int,
    names: Sequence[str],
    mine: Mapping[str, Any],
    timeout: float,
    numbers: Sequence[int] | None = None,
) -> None:
    """Returns once all ranks have published equal contracts; raises on every rank if contracts differ.

    Args:
        store: shared by the ranks; no call of it waits for others. Its keys are used once: give each use a prefix.
        rank: this process.
        names: of all ranks, in messages.
        mine: the entries that must be equal on all ranks; anything that JSON can express.
        timeout: seconds to wait for other ranks.
        numbers: of the ranks in the job, likewise; None: they are counted from 0.

    Raises:
        ValueError: the contracts differ; the message shows exactly the entries that do.
        TimeoutError: ranks are missing, and the contracts of the others are equal.
        TypeError: JSON cannot express an entry.

    Example:
        >>> from torch.distributed import HashStore
        >>> agree(HashStore(), 0, ["rank 0"], {"chunks": 8, "schedule": "1f1b"}, timeout=60)
    """
    text = json.dumps(json.loads(json.dumps(mine)), sort_keys=True)  # keys become text before they are sorted
    client, own = StoreClient(store, own=False), hashlib.sha256(text.encode()).hexdigest()
    begun, ranks = time.monotonic(), len(names)
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    if len(packed) <= _MOST_SENT and client.read(f"contract/{own}") is None:
        client.write(f"contract/{own}", packed)
    client.write(f"digest/{rank}", own)
    digests: dict[int, str] = {rank: own}
    deadline = begun + timeout
    while len(digests) < ranks and time.monotonic() < deadline:
        for other in {*range(ranks)} - digests.keys():
            if (raw := client.read(f"digest/{other}")) is not None:
                digests[other] = raw.decode(errors="replace")
                if digests[other] != own:
                    deadline = min(deadline, time.monotonic() + _SETTLE)
        time.sleep(_POLL)
    missing = [name for other, name in enumerate(names) if other not in digests]
    absent = f"{', '.join(missing)} did not come within {time.monotonic() - begun:.0f} s"
    if len({*digests.values()}) > 1:
        contracts = {**_published(client, rank, digests), own: json.loads(text)}
        in_job = numbers or range(ranks)
        lines = _differences({in_job[other]: contracts.get(digests[other]) for other in sorted(digests)})
        raise ValueError(
            "the ranks were started with different settings, and must have the same:\n"
            + "\n".join(f"  {line}" for line in lines)
            + (f"\n({absent})" if missing else "")
        )
    if missing:
        raise TimeoutError(f"{absent}; {len(digests)} of {ranks} ranks are there. Look at the logs of the missing ones")


def _published(client: StoreClient, rank: int, digests: Mapping[int, str]) -> dict[str, Any]:
    """The contracts of all ranks by their digests, as far as they can be read."""
    found: dict[str, Any] = {}
    for digest in {*digests.values()}:
        # Another client of the store may have written there.
        with contextlib.suppress(ValueError, TypeError, RecursionError, zlib.error):
            if (raw := client.read(f"contract/{digest}")) is not None:
                found[digest] = dict(json.loads(zlib.decompress(base64.b64decode(raw))))
    client.write(f"read/{rank}", "1")
    # The store may live in this process, which perhaps ends with the error at once: others must have read it.
    deadline = time.monotonic() + _SETTLE
    while time.monotonic() < deadline and any(client.read(f"read/{other}") is None for other in digests):
        time.sleep(_POLL)
    return found


def _differences(contracts: Mapping[int, Any]) -> list[str]:
    """A line for each entry that differs: of lists and dicts the first difference alone.

    Args:
        contracts: by the ranks; None: it could not be read.

    Example:
        >>> _differences({0: {"chunks": 8}, 1: {"chunks": 4}, 2: {"chunks": 8}})
        ['chunks: 8 on rank 0, 2; 4 on rank 1']
        >>> _differences({0: {"layers": ["Linear", "ReLU"]}, 1: {"layers": ["Linear", "GELU"]}})
        ['layers, first difference at 1: "ReLU" on rank 0; "GELU" on rank 1']
    """
    known = {rank: contract for rank, contract in contracts.items() if contract is not None}
    lines = []
    for key in sorted({key for contract in known.values() for key in contract}):
        entries = {rank: dict(_flat(contract[key])) if key in contract else {} for rank, contract in known.items()}
        for path in {path: None for entry in entries.values() for path in entry}:
            texts = {rank: entry.get(path, "nothing") for rank, entry in entries.items()}
            if len({*texts.values()}) > 1:
                lines.append(f"{key}{path and f', first difference at {path[1:]}'}: {_having(texts)}")
                break
    if unknown := [str(rank) for rank in contracts if rank not in known]:
        lines.append(f"something else, which could not be read, on rank {', '.join(unknown)}")
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
