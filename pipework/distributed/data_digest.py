"""A digest of a mini-batch, by which ranks see that they were given the same one."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, Any, Final

import torch

from pipework.model.marks import MicroBatches, flattened
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

NO_DATA: Final = 0
_SAMPLES: Final = 512  # elements of a tensor; more take longer than a small step may be delayed
_COUNTED: Final = 3  # elements at least of what may be a sequence: two always have equal steps
_SPREAD: Final = 2654435761  # Knuth's multiplier: its multiples fall between rows and columns of any shape


def data_digest(value: Any) -> int:
    """A number of 63 bits for the tensors of a nested value: their shapes, dtypes and a sample of their elements.

    Returns:
        The number; `NO_DATA` if there is no tensor. It is odd if the elements of a sample tell rows, see `tells_rows`.

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
    digest, varies = hashlib.blake2b(digest_size=8), False
    for tensor in tensors:
        # A tensor that cannot be read by position, such as a sparse one, counts with its shape.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            for part in _parts(tensor.detach()):
                digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
                sample = _sample(part)
                digest.update(sample)
                varies |= not _is_regular(part, sample)
    return int.from_bytes(digest.digest(), "little") >> 2 << 1 | varies or 2


def tells_rows(digest: int) -> bool:
    """Whether equal data with this digest are the same rows.

    Each mini-batch may have the same constant, such as zeros, or count its rows with `torch.arange`, as the targets of
    a contrastive loss do.

    Example:
        >>> [tells_rows(data_digest(data)) for data in (torch.tensor([3, 1, 2]), torch.arange(3), torch.zeros(3))]
        [True, False, False]
    """
    return digest % 2 == 1


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """What is read of a tensor. The shape of a nested one may hold a number that each process counts for itself."""
    if not tensor.is_nested:
        return [tensor]
    if tensor.layout == torch.jagged:
        return [tensor.values(), tensor.offsets()]  # type: ignore[attr-defined]
    return tensor.unbind()


def _is_regular(tensor: Tensor, sample: bytes) -> bool:
    """Whether a tensor with this sample is constant, or counts with equal steps."""
    if sample == sample[: tensor.itemsize] * (len(sample) // tensor.itemsize):
        return True
    if tensor.dtype is torch.bool or tensor.is_complex() or tensor.numel() < _COUNTED:
        return False
    # The first elements of a large tensor are few, and more than chance would put into a row.
    places = torch.arange(min(tensor.numel(), _SAMPLES), device=tensor.device)
    steps = tensor[torch.unravel_index(places, tensor.shape)].to("cpu", torch.float64).diff()
    return bool((steps == steps[0]).all())


def _sample(tensor: Tensor) -> bytes:
    if tensor.numel() <= _SAMPLES:
        return bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    # By coordinates: a view of a tensor with other strides in one dimension would be a copy of it all.
    places = torch.arange(_SAMPLES, device=tensor.device).mul_(_SPREAD).remainder_(tensor.numel())
    return bytes(tensor[torch.unravel_index(places, tensor.shape)].view(torch.uint8).tolist())
