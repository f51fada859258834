"""Tensors that several processes share: each writes its part into a file of its own, and any others read them.

A stage has a file of the process that writes what is whole, shard 0, and one for each other process that has parts. So
what was saved on any mesh is loaded on any other: a reader puts a tensor together, and takes what is its own of it.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pipework.saving.files import DamagedError
from pipework.saving.tensor_files import TensorFile, open_tensors
from pipework.values.dtensor import is_dtensor, local_part, local_region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from pipework.backend import ProcessGroupView


class ShardPart(NamedTuple):
    """A part of a tensor.

    Attributes:
        shard: the number of the file that has it.
        offsets: of its first element in the whole tensor.
        sizes: its shape.
    """

    shard: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Sharded:
    """A tensor that is saved in parts.

    Attributes:
        shape: of the whole tensor.
        parts: each element is in one.
    """

    shape: tuple[int, ...]
    parts: tuple[ShardPart, ...]

    def to_json(self) -> Any:
        """As a JSON value."""
        return {"shape": self.shape, "parts": self.parts}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """From a JSON value."""
        parts = [ShardPart(int(shard), tuple(offsets), tuple(sizes)) for shard, offsets, sizes in value["parts"]]
        return cls(tuple(map(int, value["shape"])), tuple(parts))

    def with_parts(self, other: Sharded) -> Sharded:
        """With the parts that another process has written."""
        return Sharded(self.shape, (*self.parts, *other.parts))


class Divided(NamedTuple):
    """What one process writes of some tensors.

    Attributes:
        tensors: by name, plain ones.
        sharded: those of which they are parts.
    """

    tensors: dict[str, Tensor]
    sharded: dict[str, Sharded]


def divide(tensors: Mapping[str, Tensor], group: ProcessGroupView) -> Divided:
    """What this process writes of tensors that it holds.

    What is whole is written by the first of the processes that hold the same layers. Of a DTensor each of them writes
    its part, unless another process has the same part, which has the lower place in a dimension without sharding.

    Args:
        tensors: by name.
        group: this process among all.

    Raises:
        TypeError: a DTensor is placed in a way that no file can describe.
    """
    divided = Divided({}, {})
    for name, tensor in tensors.items():
        if not is_dtensor(tensor):
            if group.shard == 0:
                divided.tensors[name] = tensor
            continue
        names = tensor.device_mesh.mesh_dim_names
        if names is None or not {*names} <= group.place.keys():
            raise TypeError(
                f"{name!r} is a DTensor over {names or 'a mesh without names'}, and the pipe's mesh has "
                f"{tuple(group.place)}: give Pipe(mesh=) the mesh of which the layers have slices"
            )
        pairs = zip(names, tensor.placements, strict=True)
        over = {dimension for dimension, placement in pairs if not placement.is_replicate()}
        region = local_region(name, tensor)
        part = local_part(tensor)
        if any(place for dimension, place in group.place.items() if dimension not in over) or not part.numel():
            continue
        divided.tensors[name] = part
        divided.sharded[name] = Sharded(tuple(tensor.shape), (ShardPart(group.shard, *region),))
    return divided


def shards_of(sharded: Mapping[str, Sharded]) -> list[int]:
    """The numbers of the files that have parts, and of the one that has all else."""
    return sorted({0, *(part.shard for each in sharded.values() for part in each.parts)})


class StageFiles:
    """The opened files of one stage, from which tensors are read whole; a context manager.

    Args:
        paths: of the files, by the number of the shard.
        sharded: the tensors that are saved in parts, by their name in the files.
    """

    def __init__(self, paths: Mapping[int, Path], sharded: Mapping[str, Sharded]) -> None:
        self._paths = paths
        self._sharded = sharded
        self._stack = contextlib.ExitStack()
        self._files: dict[int, TensorFile] = {}

    def __enter__(self) -> Self:
        with self._stack:
            for shard, path in self._paths.items():
                self._files[shard] = self._stack.enter_context(open_tensors(path))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own.

        Raises:
            DamagedError: a file has no such tensor, or parts are missing.
        """
        sharded = self._sharded.get(name)
        if sharded is None:
            return self._files[0].read(name)
        whole: Tensor | None = None
        count = 0
        for shard, offsets, sizes in sharded.parts:
            part = self._files[shard].read(name)
            if tuple(part.shape) != sizes:
                raise DamagedError(f"{self._paths[shard].name}: a part of {name} has the shape {tuple(part.shape)}")
            if whole is None:
                whole = part.new_empty(sharded.shape)
            place = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            whole[place] = part
            count += part.numel()
        if whole is None or count != math.prod(sharded.shape):
            raise DamagedError(f"{self._paths[0].name}: of {name}, {count} elements were saved, not all")
        return whole


def own_part(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, what this process holds of another one that is placed in some way; all if that is whole."""
    if not is_dtensor(like):
        return tensor
    offsets, sizes = local_region("it", like)
    return tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))].clone()


def open_stage(
    path: Path, file: Callable[[int], str], sharded: Mapping[str, Sharded], shards: Iterable[int]
) -> StageFiles:
    """The files of a stage.

    Args:
        path: of the checkpoint.
        file: the name of the file of a shard.
        sharded: see `StageFiles`.
        shards: the numbers of the files.
    """
    return StageFiles({shard: path / file(shard) for shard in shards}, sharded)
