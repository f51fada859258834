"""Which input tensors require a gradient: the process that reads the inputs tells the others, which may want them."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from pipework.model.given import MicroBatches, flattened
from pipework.values import nested

if TYPE_CHECKING:
    from pipework.model.given import Given
    from pipework.model.microbatch import Split

_BITS: Final = 30  # each for a tensor, or for every thirtieth


def requires_gradients(value: Any) -> bool:
    """Whether an argument of a pipe has a tensor that requires a gradient.

    Example:
        >>> import torch
        >>> value = torch.ones(2, requires_grad=True)
        >>> requires_gradients({"x": value.detach()}), requires_gradients(MicroBatches([value]))
        (False, True)
    """
    if value is None or type(value) is Tensor:  # the usual cases
        return value is not None and value.requires_grad
    return any(tensor.requires_grad for tensor in flattened(nested.replaced(value, MicroBatches, list))[0])


def required_gradients(batch: Split | Given) -> int:
    """A number that says which tensors of a mini-batch require a gradient, and how they are cut; 0: none does."""
    required = {number % _BITS for number, tensor in enumerate(batch.tensors) if tensor.requires_grad}
    if not required:
        return 0
    form = zlib.crc32(repr(([tuple(tensor.shape) for tensor in batch.tensors], batch.splits)).encode())
    return form << _BITS | sum(1 << number for number in required)


def gradients_are_there(wanted: int, computed: int) -> bool:
    """Whether a process that requires gradients gets them from the one that reads the inputs; see `required_gradients`.

    Example:
        >>> gradients_are_there(0, 5), gradients_are_there(4, 5), gradients_are_there(2, 5)
        (True, True, False)
    """
    return wanted == 0 or (wanted >> _BITS == computed >> _BITS and not wanted & ~computed)
