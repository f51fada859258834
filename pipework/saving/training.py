"""What belongs to no stage: where the data are, random states, a scheduler, a scaler. Every rank has its own.

Replicas differ, since each reads other data. The ranks of one replica mostly agree, as they run the same script. So the
first rank of each replica writes all that it was given, and the others only what is something else there. Of two
replicas of three ranks, the last of which draws random numbers of its own:

    replica 0                 replica 1
    rank 0  1  2              rank 3  4  5
         all   random              all   random

A rank goes on with what it wrote itself, and with its replica's for the rest. As with stages, there may be another
number of ranks and of replicas by then.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pipework.saving.files import DamagedError, check_sealed, making_sense
from pipework.saving.manifest import read_json, training_files
from pipework.saving.tensor_files import Kind, NamedTensors, bytes_of, open_tensors
from pipework.values.json_codec import JsonCodec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from pipework.saving.manifest import Manifest
    from pipework.saving.ranks import Seat

POSITION: Final = "data_position"
RANDOM: Final = "random"


@dataclass(frozen=True)
class Packed:
    """What a rank was given, ready to be written.

    Attributes:
        values: JSON, by what it is of.
        tensors: which belong to it.
        digests: by what each is known again; of a data position that was not given, none.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, NamedTensors]
    digests: Mapping[str, str]

    @staticmethod
    def of(given: Mapping[str, Any]) -> Packed:
        """From plain values.

        Raises:
            TypeError: something cannot be saved.

        Example:
            >>> packed = Packed.of({"data_position": (1, 2)})
            >>> packed.values
            {'data_position': {'$': 'tuple', 'items': [1, 2]}}
            >>> packed.beside(packed.digests).values
            {}
        """
        tensors = {name: NamedTensors() for name in given}
        values = {name: JsonCodec(put=tensors[name].put).encode(value, name) for name, value in given.items()}
        digests = {name: _digest(value, tensors[name]) for name, value in values.items() if value is not None}
        return Packed(values, tensors, digests)

    def beside(self, others: Mapping[str, str]) -> Packed:
        """What is something else than what another rank has, by its digests."""
        own = {name: digest for name, digest in self.digests.items() if others.get(name) != digest}
        return Packed({name: self.values[name] for name in own}, {name: self.tensors[name] for name in own}, own)

    @property
    def all_tensors(self) -> dict[str, Tensor]:
        """Those of all values: their names begin with that of the value."""
        return {name: tensor for each in self.tensors.values() for name, tensor in each.items()}


def sources(manifest: Manifest, seat: Seat) -> list[int]:
    """The ranks that may have written what a rank goes on with, the best first.

    Args:
        manifest: of the checkpoint.
        seat: of the rank, now.

    Example:
        >>> from pipework.saving.ranks import Seat
        >>> from pipework.saving.manifest import Manifest
        >>> written = {file: None for rank in (0, 3, 5) for file in training_files(rank)}
        >>> manifest = Manifest(step=1, ranks=6, replicas=2, stages=(), files=written)
        >>> sources(manifest, Seat(worker=2, workers=3, replica=1, replicas=2))
        [5, 3]
        >>> sources(manifest, Seat(worker=0, workers=1, replica=1, replicas=2))
        [3, 5]
    """
    workers = manifest.ranks // manifest.replicas
    first = workers * (seat.replica if seat.replica < manifest.replicas else 0)
    own = [first + seat.worker] if seat.workers == workers else []
    every = dict.fromkeys([*own, *range(first, first + workers)])
    return [rank for rank in every if rank == first or training_files(rank)[1] in manifest.files]


def read_training(path: Path, manifest: Manifest, seat: Seat, *, alike: bool) -> dict[str, Any]:
    """What a rank goes on with; without random states if it is to keep its own.

    Args:
        path: the checkpoint.
        manifest: its table of contents.
        seat: of the rank.
        alike: the generators of all replicas are in the same state now, so that replicas are meant to draw the same.

    Raises:
        DamagedError: a file is not what was written.
    """
    found: dict[str, Any] = {}
    ranks = sources(manifest, seat)
    for rank in ranks:
        tensors, values = training_files(rank)
        check_sealed(path / tensors, manifest.seal(tensors))
        packed = read_json(path, manifest, values)
        with open_tensors(path / tensors) as opened, making_sense(values):
            read = {str(name): JsonCodec(get=opened.read).decode(value) for name, value in packed.items()}
        found = {**read, **{name: value for name, value in found.items() if value is not None or name != POSITION}}
    if RANDOM not in found:
        raise DamagedError(f"{training_files(ranks[0])[1]}: it has no random states")
    if seat.replica >= manifest.replicas and not alike:
        del found[RANDOM]
    return {POSITION: None, **found}


def what_differs(manifest: Manifest, seat: Seat, *, alike: bool) -> list[tuple[int, str]]:
    """What one should know who goes on with another number of ranks, each with its level of logging."""
    return [*_other_replicas(manifest.replicas, seat.replicas, alike=alike), *_other_workers(manifest, seat.workers)]


def _other_replicas(saved: int, here: int, *, alike: bool) -> Iterator[tuple[int, str]]:
    begin = (
        f"it is of {_counted(saved, 'replica')}, and here {'is' if here == 1 else 'are'} {_counted(here, 'replica')}"
    )
    if here < saved:
        left_out = _numbers(here, saved)
        yield logging.WARNING, f"{begin}: the data position and the random states of {left_out} are left out"
    elif here > saved:
        random = "whose random states stay what they are, since the script has seeded replicas differently"
        if alike:
            random = "as do its random states, since the script has seeded all alike"
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
