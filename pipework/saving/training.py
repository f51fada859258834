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
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pipework.saving.files import DamagedError, parsing, verify_file
from pipework.saving.manifest import read_json, training_files
from pipework.saving.tensor_files import Kind, NamedTensors, bytes_of, open_tensors
from pipework.values.json_codec import JsonCodec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from pipework.saving.collective import MeshCoordinate
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


def sources(manifest: Manifest, coordinate: MeshCoordinate) -> list[int]:
    """The ranks whose files a rank resumes from, the preferred one first.

    Example:
        >>> from pipework.saving.collective import MeshCoordinate
        >>> from pipework.saving.manifest import Manifest
        >>> written = {file: None for rank in (0, 3, 5) for file in training_files(rank)}
        >>> manifest = Manifest(step=1, ranks=6, replicas=2, stages=(), files=written)
        >>> sources(manifest, MeshCoordinate(worker=2, workers=3, replica=1, replicas=2))
        [5, 3]
        >>> sources(manifest, MeshCoordinate(worker=0, workers=1, replica=1, replicas=2))
        [3, 5]
    """
    workers = manifest.ranks // manifest.replicas
    first = workers * (coordinate.replica if coordinate.replica < manifest.replicas else 0)
    own = [first + coordinate.worker] if coordinate.workers == workers else []
    every = dict.fromkeys([*own, *range(first, first + workers)])
    return [rank for rank in every if rank == first or training_files(rank)[1] in manifest.files]


def read_training(path: Path, manifest: Manifest, coordinate: MeshCoordinate, *, same_random: bool) -> dict[str, Any]:
    """The training state that a rank resumes with; without random states if it is to keep its own.

    Args:
        path: the checkpoint.
        manifest: its table of contents.
        coordinate: the position of the rank.
        same_random: whether the generators of all replicas are in the same state now: then all replicas are meant to
            draw the same numbers.

    Raises:
        DamagedError: a file differs from what was written.
    """
    found: dict[str, Any] = {}
    ranks = sources(manifest, coordinate)
    for rank in ranks:
        tensors, values = training_files(rank)
        verify_file(path / tensors, manifest.checksum(tensors))
        forms = read_json(path, manifest, values)
        with open_tensors(path / tensors) as opened, parsing(values):
            read = {str(name): JsonCodec(get=opened.read).decode(value) for name, value in forms.items()}
        found = {**read, **{name: value for name, value in found.items() if value is not None or name != POSITION}}
    if RANDOM not in found:
        raise DamagedError(f"{training_files(ranks[0])[1]}: it has no random states")
    if coordinate.replica >= manifest.replicas and not same_random:
        del found[RANDOM]
    return {POSITION: None, **found}


def notes_on_ranks(manifest: Manifest, coordinate: MeshCoordinate, *, same_random: bool) -> list[tuple[int, str]]:
    """Messages for a resumption with another number of ranks, each with its level of logging."""
    return [
        *_other_replicas(manifest.replicas, coordinate.replicas, same_random=same_random),
        *_other_workers(manifest, coordinate.workers),
    ]


def _other_replicas(saved: int, here: int, *, same_random: bool) -> Iterator[tuple[int, str]]:
    begin = (
        f"it is of {_counted(saved, 'replica')}, and here {'is' if here == 1 else 'are'} {_counted(here, 'replica')}"
    )
    if here < saved:
        left_out = _numbers(here, saved)
        yield logging.WARNING, f"{begin}: the data position and the random states of {left_out} are left out"
    elif here > saved:
        random = "whose random states stay what they are, since the script has given them different seeds"
        if same_random:
            random = "as do its random states, since the script has given all replicas the same seed"
        further = _numbers(saved, here)
        yield logging.WARNING, f"{begin}: the data position of replica 0 goes to {further}, too, {random}"


def _other_workers(manifest: Manifest, here: int) -> Iterator[tuple[int, str]]:
    saved = manifest.ranks // manifest.replicas
    special = [rank for rank in range(manifest.ranks) if rank % saved and training_files(rank)[1] in manifest.files]
    if here != saved and special:
        begin = f"its replicas were of {_counted(saved, 'process')}, and here of {_counted(here, 'process')}"
        which = f"rank{'' if len(special) == 1 else 's'} {', '.join(map(str, special))}"
        what = f"what was special to {which}, such as random states, gives way to what the first of them had"
        yield logging.INFO, f"{begin}: {what}"


def _counted(number: int, what: str) -> str:
    ending = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else ending}"


def _numbers(first: int, end: int) -> str:
    return f"replica {first}" if end == first + 1 else f"replicas {first} to {end - 1}"


def _digest(value: Any, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(value).encode())
    for name, tensor in tensors.items():
        digest.update(json.dumps([name, *Kind.of(tensor)]).encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
