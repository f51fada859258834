"""Tensors in a safetensors file, written one by one, so that memory never holds a second copy of a model.

The format is a length, a header in JSON and the bytes. A tensor that it cannot hold is refused before anything is
written. The safetensors library reads the files and validates their headers.
"""

from __future__ import annotations

import json
import math
import struct
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch

from pipework.saving.files import DamagedError, unreadable, write_file
from pipework.values.dtensor import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from pipework.saving.files import Checksum

_CODES: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
_DTYPES: Final = MappingProxyType({str(dtype).removeprefix("torch."): dtype for dtype in _CODES})


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
    elif tensor.dtype not in _CODES:
        reason = f"its dtype is {tensor.dtype}, wanted one of {', '.join(_DTYPES)}"
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
    sizes = {name: _DTYPES[kind.dtype].itemsize * math.prod(kind.shape) for name, kind in kinds.items()}
    # The widest elements come first: then each tensor begins at a multiple of its element size.
    order = sorted(kinds, key=lambda name: (-_DTYPES[kinds[name].dtype].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + sizes[name]
        code = _CODES[_DTYPES[kinds[name].dtype]]
        header[name] = {"dtype": code, "shape": kinds[name].shape, "data_offsets": [start, end]}
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
