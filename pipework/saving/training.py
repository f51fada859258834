"""The training state that belongs to no stage: data position, random states, scheduler, scaler. Every rank has its own.

Replicas differ, as each reads other data. The ranks of one replica are mostly equal, as they run the same script. So
the first rank of each replica writes everything, and the others write what differs from it. An example with two
replicas of three ranks, the last of which uses random numbers of its own:

    replica 0                 replica 1
    rank 0  1  2              rank 3  4  5
         all   random              all   random

A rank resumes with the state that it wrote, and with that of its replica's first rank for the rest. The number of ranks
and of replicas may have changed by then.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from pipework.saving.files import DamagedError, parsing
from pipework.saving.manifest import training_files
from pipework.saving.tensor_files import Kind, NamedTensors, bytes_of, open_tensors
from pipework.values.json_codec import JsonCodec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from pipework.backend import ProcessGroupView
    from pipework.saving.manifest import Manifest

POSITION: Final = "data_position"
RANDOM: Final = "random"


@dataclass(frozen=True)
class TrainingState:
    """The training state of a rank, ready to be written.

    Attributes:
        values: the JSON of each state, by its name.
        tensors: the tensors of each state.
        digests: the digest of each state; none of a data position that was not given.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, NamedTensors]
    digests: Mapping[str, str]

    @staticmethod
    def of(given: Mapping[str, Any]) -> TrainingState:
        """Encodes states.

        Raises:
            TypeError: a state cannot be saved.

        Example:
            >>> state = TrainingState.of({"data_position": (1, 2)})
            >>> state.values
            {'data_position': {'$': 'tuple', 'items': [1, 2]}}
            >>> state.different_from(state.digests).values
            {}
        """
        tensors = {name: NamedTensors() for name in given}
        values = {name: JsonCodec(put=tensors[name].put).encode(value, name) for name, value in given.items()}
        digests = {name: _digest(value, tensors[name]) for name, value in values.items() if value is not None}
        return TrainingState(values, tensors, digests)

    def different_from(self, others: Mapping[str, str]) -> TrainingState:
        """The states that differ from those of another rank, by their digests."""
        own = {name: digest for name, digest in self.digests.items() if others.get(name) != digest}
        return TrainingState({name: self.values[name] for name in own}, {name: self.tensors[name] for name in own}, own)

    @property
    def all_tensors(self) -> dict[str, Tensor]:
        """The tensors of all states. Their names begin with the name of the state."""
        return {name: tensor for each in self.tensors.values() for name, tensor in each.items()}


def with_state(**objects: Any) -> dict[str, Any]:
    """The objects, such as a scheduler, that are not None.

    Raises:
        TypeError: an object has no state that can be saved and loaded.
    """
    there = {name: each for name, each in objects.items() if each is not None}
    for name, each in there.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(f"{name} must have state_dict() and load_state_dict(), got a {type(each).__name__}")
    return there


def sources(manifest: Manifest, group: ProcessGroupView) -> list[int]:
    """The ranks whose files a rank resumes from, the preferred one first.

    Example:
        >>> from pipework.backend import ProcessGroupView
        >>> from pipework.saving.manifest import Manifest
        >>> written = {file: None for rank in (0, 3, 5) for file in training_files(rank)}
        >>> manifest = Manifest(step=1, ranks=6, replicas=2, stages=(), files=written)
        >>> sources(manifest, ProcessGroupView(rank=5, everyone=range(6), replica=1, replicas=2))
        [5, 3]
        >>> sources(manifest, ProcessGroupView(rank=1, everyone=range(2), replica=1, replicas=2))
        [3, 5]
    """
    workers = manifest.ranks // manifest.replicas
    first = workers * (group.replica if group.replica < manifest.replicas else 0)
    own = [first + group.worker] if group.workers == workers else []
    every = dict.fromkeys([*own, *range(first, first + workers)])
    return [rank for rank in every if rank == first or training_files(rank)[1] in manifest.files]


def read_training(
    path: Path, manifest: Manifest, group: ProcessGroupView, *, same_random: bool
) -> tuple[dict[str, Any], str]:
    """The training state that a rank resumes with, and a note on what is left out, or an empty text.

    The state has no random states if the rank is to keep its own.

    Args:
        path: the checkpoint.
        manifest: its table of contents.
        group: the rank among all.
        same_random: whether the generators of all replicas are in the same state now: then all replicas are meant to
            draw the same numbers.

    Raises:
        DamagedError: a file differs from what was written.
    """
    found: dict[str, Any] = {}
    ranks = sources(manifest, group)
    for rank in ranks:
        tensors, values = training_files(rank)
        forms = manifest.read_json(path, values)
        with open_tensors(manifest.verify(path, tensors)) as opened, parsing(values):
            read = {str(name): JsonCodec(get=opened.read).decode(value) for name, value in forms.items()}
        found = {**read, **{name: value for name, value in found.items() if value is not None or name != POSITION}}
    if RANDOM not in found:
        raise DamagedError(f"{training_files(ranks[0])[1]}: it has no random states")
    if group.replica >= manifest.replicas and not same_random:
        del found[RANDOM]
    return {POSITION: None, **found}, note_on_ranks(manifest, group, same_random=same_random)


def note_on_ranks(manifest: Manifest, group: ProcessGroupView, *, same_random: bool) -> str:
    """What a resumption with another number of replicas or workers leaves out; an empty text if nothing."""
    workers, replicas = manifest.ranks // manifest.replicas, manifest.replicas
    files = [training_files(rank)[1] for rank in range(manifest.ranks) if rank % workers]
    if group.replicas == replicas and (group.workers == workers or manifest.files.keys().isdisjoint(files)):
        return ""
    states = "and also its random states" if same_random else "and keep their own random states"
    return (
        f"it is of {replicas} replicas with {workers} workers, and here are {group.replicas} with "
        f"{group.workers}: the data positions, random states and others of ranks that are not here any more are "
        f"left out; replicas from {replicas} on get the data position of replica 0, {states}"
    )


def _digest(value: Any, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(value).encode())
    for name, tensor in tensors.items():
        digest.update(json.dumps([name, *Kind.of(tensor)]).encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def random_states() -> dict[str, Any]:
    """The states of PyTorch's generators (CPU and accelerators), Python's and, if numpy was imported, numpy's.

    Example:
        >>> before = random_states()
        >>> numbers = torch.rand(2), random.random()
        >>> set_random_states(before)
        >>> torch.equal(torch.rand(2), numbers[0]), random.random() == numbers[1]
        (True, True)
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    module = _accelerator()
    if module is not None:
        states["accelerator"] = [module.get_rng_state(*place) for place in _places()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        # The key of a Mersenne Twister is the one array in it.
        state["state"] = {k: v.tolist() if isinstance(v, numpy.ndarray) else v for k, v in state["state"].items()}
        states["numpy"] = state
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restores the states of the generators that exist here."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    module, saved = _accelerator(), states.get("accelerator", [])
    for place, state in zip(_places() if module is not None else [], saved, strict=False):
        module.set_rng_state(state, *place)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])


def _places() -> list[tuple[int, ...]]:
    """The device argument for each accelerator's generator. Some kinds take none if there is one device."""
    count = torch.accelerator.device_count()
    return [()] if count == 1 else [(index,) for index in range(count)]


def _accelerator() -> Any:
    """PyTorch's module for the available accelerator."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    module = getattr(torch, accelerator.type, None) if accelerator is not None else None
    return module if hasattr(module, "get_rng_state") else None
