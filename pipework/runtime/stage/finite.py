"""Refuses values that are not finite, in the stage and micro-batch in which they appear first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def refuse_non_finite(tensors: Iterable[Tensor | None], what: str) -> None:
    """Raises a FloatingPointError if any of the tensors holds NaN or an infinity.

    Args:
        tensors: to check; None and tensors of integers pass.
        what: their name, for the message.
    """
    for tensor in tensors:
        if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce().values()
        if not bool(torch.isfinite(tensor).all()):
            values = tensor.detach()
            nan, infinite = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
            raise FloatingPointError(
                f"{what} is not finite: {nan} NaN and {infinite} infinite of {values.numel()} values "
                f"(shape {tuple(values.shape)}, {values.dtype}). Look at the stage's input and layers, at the "
                "learning rate, and at the range of the dtype"
            )
