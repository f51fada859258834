"""Tensors in a safetensors file, written one by one, so that memory never holds a second copy of a model.

The format is a length, a header in JSON and the bytes. A tensor that it cannot hold is refused before anything is
written. The safetensors library reads the files and validates their headers.

Of a tensor that several processes share, each writes its part into a file of its own, and any others read them. A stage
has a file of the process that writes what is whole, shard 0, and one for each other process that has parts. So what was
saved on any mesh is loaded on any other: a reader puts a tensor together, and takes what is its own of it.
"""

from __future__ import annotations

import json
import math
import struct
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch

from pipework.saving.files import DamagedError, unreadable, write_file
from pipework.values.dtensor import is_dtensor, local_part, local_region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from pipework.backend import ProcessGroupView
    from pipework.saving.files import Checksum

_KINDS: Final = (
    "float64=F64 float32=F32 float16=F16 bfloat16=BF16 float8_e4m3fn=F8_E4M3 float8_e4m3fnuz=F8_E4M3FNUZ "
    "float8_e5m2=F8_E5M2 float8_e5m2fnuz=F8_E5M2FNUZ complex64=C64 int64=I64 int32=I32 int16=I16 int8=I8 uint64=U64 "
    "uint32=U32 uint16=U16 uint8=U8 bool=BOOL"
)
_CODES: Final[Mapping[str, str]] = MappingProxyType(dict(pair.split("=") for pair in _KINDS.split()))
"""The code of each dtype in a file, by its name in PyTorch."""


class Kind(NamedTuple):
    """The dtype and the shape of a tensor.

    Example:
        >>> str(Kind.of(torch.zeros(2, 3)))
        '(2, 3) float32'
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The dtype and the shape of this tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


def require_safetensors() -> Any:
    """The module safetensors.

    Raises:
        ImportError: safetensors is not installed.
    """
    try:
        return import_module("safetensors")
    except ImportError:
        raise ImportError(
            "checkpoints are kept in safetensors files, and safetensors is not installed: "
            "pip install '.[checkpoint]' in pipework's checkout"
        ) from None


def check_savable(name: str, tensor: Tensor, *, waits: bool = False) -> None:
    """Refuses a tensor that a safetensors file cannot hold.

    Args:
        name: for the error.
        tensor: the tensor.
        waits: accept a tensor on the meta device, whose values are to be read.

    Raises:
        TypeError: the tensor is sparse, has no data, or is of a dtype that the format does not have.
    """
    reason = None
    if tensor.layout != torch.strided:
        reason = f"its layout is {tensor.layout}, wanted a dense tensor"
    elif tensor.device.type == "meta" and not waits:
        reason = "it lies on the meta device and has no data"
    elif Kind.of(tensor).dtype not in _CODES:
        reason = f"its dtype is {tensor.dtype}, wanted one of {', '.join(_CODES)}"
    elif not is_dtensor(tensor) and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        reason = f"it is a {type(tensor).__name__}, whose data may lie anywhere; wanted a plain tensor"
    if reason:
        raise TypeError(f"{name!r} cannot be saved in a safetensors file: {reason}")


class NamedTensors(dict[str, "Tensor"]):
    """Tensors to be written, by name."""

    def put(self, name: str, tensor: Tensor) -> str:
        """Adds a tensor.

        Returns:
            The name that it has got, which no other tensor has.

        Raises:
            TypeError: a safetensors file cannot hold it.

        Example:
            >>> tensors = NamedTensors()
            >>> tensors.put("a/b", torch.zeros(1)), tensors.put("a/b", torch.ones(1))
            ('a/b', "a/b'")
        """
        while name in self:
            name += "'"
        check_savable(name, tensor)
        self[name] = tensor
        return name


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Checksum:
    """Writes tensors by name. All of them have passed `check_savable`."""
    return write_by_name(path, {name: Kind.of(tensor) for name, tensor in tensors.items()}, tensors.__getitem__)


def write_by_name(path: Path, kinds: Mapping[str, Kind], get: Callable[[str], Tensor]) -> Checksum:
    """Writes tensors by name, and gets each when its turn comes, so that one at a time is in memory."""
    widths = {name: getattr(torch, kind.dtype).itemsize for name, kind in kinds.items()}
    sizes = {name: widths[name] * math.prod(kind.shape) for name, kind in kinds.items()}
    # The widest elements come first: then each tensor begins at a multiple of its element size.
    order = sorted(kinds, key=lambda name: (-widths[name], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + sizes[name]
        kind = kinds[name]
        header[name] = {"dtype": _CODES[kind.dtype], "shape": kind.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(text)) + text
        for name in order:
            if sizes[name]:
                yield bytes_of(get(name))

    return write_file(path, pieces())


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in a file."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file that is read tensor by tensor.

    Attributes:
        names: of the tensors in it.
    """

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self.names = frozenset(file.keys())

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own.

        Raises:
            DamagedError: the file has no such tensor, or it cannot be read.
        """
        if name not in self.names:
            raise DamagedError(f"{self._path.name}: it holds no tensor {name!r}")
        try:
            tensor: Tensor = self._file.get_tensor(name)
            return tensor.clone()
        except Exception as error:
            raise unreadable(self._path, error) from error


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Opens a safetensors file.

    Raises:
        DamagedError: the file is missing, or is no safetensors file.
    """
    safetensors = require_safetensors()
    try:
        file = safetensors.safe_open(path, framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise unreadable(path, error) from error
    with file as opened:
        yield TensorFile(path, opened)


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

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """From a JSON value."""
        parts = [ShardPart(int(shard), tuple(offsets), tuple(sizes)) for shard, offsets, sizes in value["parts"]]
        return cls(tuple(map(int, value["shape"])), tuple(parts))


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


@contextmanager
def open_stage(paths: Mapping[int, Path], sharded: Mapping[str, Sharded]) -> Iterator[Callable[[str], Tensor]]:
    """Opens the files of one stage. Inside, a function reads a tensor whole, by its name, in memory of its own.

    Args:
        paths: of the files, by the number of the shard.
        sharded: the tensors that are saved in parts, by their name in the files.

    Raises:
        DamagedError: a file has no such tensor, or parts are missing.
    """
    with ExitStack() as stack:
        files = {shard: stack.enter_context(open_tensors(path)) for shard, path in paths.items()}

        def read(name: str) -> Tensor:
            if name not in sharded:
                return files[0].read(name)
            shape, parts = sharded[name].shape, sharded[name].parts
            read = [files[part.shard].read(name) for part in parts]
            if sum(part.numel() for part in read) != math.prod(shape) or not read:
                raise DamagedError(f"{paths[0].name}: not all elements of {name} were saved")
            whole = read[0].new_empty(shape)
            for tensor, (shard, offsets, sizes) in zip(read, parts, strict=True):
                if tuple(tensor.shape) != sizes:
                    raise DamagedError(f"{paths[shard].name}: a part of {name} has the shape {tuple(tensor.shape)}")
                whole[_place(offsets, sizes)] = tensor
            return whole

        yield read


def own_part(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, what this process holds of another one that is placed in some way; all if that is whole."""
    return tensor[_place(*local_region("it", like))].clone() if is_dtensor(like) else tensor


def _place(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
