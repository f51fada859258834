"""The bytes of a tensor of any dtype: read as integers of the same size, which every operator copies exactly."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_OF_SIZE: Final[Mapping[int, torch.dtype]] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
)


def as_bytes(name: str, tensor: Tensor) -> Tensor:
    """The bytes of the elements in contiguous order; the tensor's own memory if it is contiguous.

    Args:
        name: of the tensor in errors.
        tensor: on any device.

    Raises:
        TypeError: it is sparse, quantized or a wrapper of other tensors.

    Example:
        >>> as_bytes("x", torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).t()).tolist()
        [1, 0, 3, 0, 2, 0, 4, 0]
    """
    what = None
    if tensor.layout is not torch.strided:
        what = f"has the layout {tensor.layout}"
    elif tensor.is_quantized:
        what = f"is quantized, {tensor.dtype}"
    elif torch_private.is_wrapper_subclass(tensor):
        what = f"is a {type(tensor).__qualname__}, which stands for other tensors"
    if what is not None:
        raise TypeError(
            f"{name} {what}, so its values cannot be sent to other replicas as bytes: keep it as a dense torch.Tensor, "
            "or not as a parameter or buffer"
        )
    return _integers(tensor.resolve_conj().resolve_neg()).contiguous().reshape(-1).view(torch.uint8)


def write_bytes(data: Tensor, tensor: Tensor) -> None:
    """Writes bytes that `as_bytes` returned into a tensor of the same shape and dtype.

    Example:
        >>> half = torch.zeros(2, dtype=torch.float16)
        >>> write_bytes(as_bytes("x", torch.ones(2, dtype=torch.float16)), half)
        >>> half
        tensor([1., 1.], dtype=torch.float16)
    """
    if data.data_ptr() == tensor.data_ptr() and tensor.is_contiguous():
        return
    with torch.no_grad():
        if tensor.is_conj() or tensor.is_neg():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
            return
        to = _integers(tensor)
        source = data.view(to.dtype).view(to.shape)
        for dimension, stride in enumerate(to.stride()):
            if stride == 0:  # expanded: all elements along it share memory
                to, source = to.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
        to.copy_(source)


def _integers(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    return plain.view(_OF_SIZE[plain.itemsize])
