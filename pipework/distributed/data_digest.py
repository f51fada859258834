"""A digest of a mini-batch, by which ranks see that they were given the same one."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, Any, Final

import torch

from pipework.model.given import MicroBatches, flattened
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

NO_DATA: Final = 0
_SAMPLES: Final = 512  # elements of a tensor; more take longer than a small step may be delayed
_SPREAD: Final = 2654435761  # Knuth's multiplier: its multiples fall between rows and columns of any shape


def data_digest(value: Any) -> int:
    """A number of 63 bits for the tensors of a nested value: their shapes, dtypes and a sample of their elements.

    Returns:
        The number; `NO_DATA` if there is no tensor.

    Example:
        >>> x = torch.randn(4, 8)
        >>> data_digest((x,)) == data_digest((x.clone(),)), data_digest((x,)) == data_digest((x.flip(0),))
        (True, False)
        >>> data_digest((None,)) == NO_DATA
        True
    """
    tensors, _, _ = flattened(nested.replaced(value, MicroBatches, list))
    if not tensors:
        return NO_DATA
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        # A tensor that cannot be read by position, such as a sparse one, counts with its shape.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            for part in _parts(tensor.detach()):
                digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
                digest.update(_sample(part))
    return int.from_bytes(digest.digest(), "little") >> 1 or 1


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """What is read of a tensor. The shape of a nested one may hold a number that each process counts for itself."""
    if not tensor.is_nested:
        return [tensor]
    if tensor.layout == torch.jagged:
        return [tensor.values(), tensor.offsets()]  # type: ignore[attr-defined]
    return tensor.unbind()


def _sample(tensor: Tensor) -> bytes:
    if tensor.numel() <= _SAMPLES:
        return bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    # By coordinates: a view of a tensor with other strides in one dimension would be a copy of it all.
    places = torch.arange(_SAMPLES, device=tensor.device).mul_(_SPREAD).remainder_(tensor.numel())
    return bytes(tensor[torch.unravel_index(places, tensor.shape)].view(torch.uint8).tolist())
