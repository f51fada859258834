"""Whether a recomputation gives the output of the first pass: for one micro-batch of each of the first mini-batches.

Random numbers of PyTorch's default generators and buffers are as they were in the first pass. Numbers from elsewhere,
and other state that a layer changes, are not: gradients would then be those of another output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipework.runtime.caller_modes import Modes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MINI_BATCHES = 4  # a layer that is left out now and then is seldom seen in the first one


class RecomputeCheck:
    """Keeps the output of the first checkpointed micro-batch of one mini-batch on one stage, until it is recomputed.

    Args:
        looks: has one entry for each further mini-batch that is to be checked.
    """

    __slots__ = ("_kept", "_looks", "_micro_batch")

    def __init__(self, looks: Iterator[int]) -> None:
        self._looks: Iterator[int] | None = looks
        self._micro_batch = -1
        self._kept: tuple[Tensor, ...] = ()

    def keep(self, micro_batch: int, outputs: Sequence[Tensor]) -> None:
        """Copies the outputs of a first pass, if it is the one to be checked."""
        if self._looks is None:
            return
        wanted, self._looks = next(self._looks, None) is not None, None
        # A mode of the caller's around one of the two passes changes the output of that one alone.
        if wanted and not Modes.capture() and all(type(output) is Tensor and _comparable(output) for output in outputs):
            self._micro_batch = micro_batch
            self._kept = tuple([output.detach().clone() for output in outputs])  # a later stage may write to them

    def compare(self, micro_batch: int, outputs: Sequence[Tensor], place: str) -> None:
        """Compares the outputs of a recomputation.

        Args:
            micro_batch: its number.
            outputs: likewise.
            place: the stage, for the message.

        Raises:
            RuntimeError: they are others.
        """
        if micro_batch != self._micro_batch:
            return
        kept = self._kept
        self.clear()
        if Modes.capture():
            return
        if len(kept) != len(outputs) or not all(map(_same, kept, outputs)):
            raise RuntimeError(
                f"{place} gave another output when it was recomputed for its backward, so gradients would be wrong: a "
                "layer (or loss_fn, in the last stage) draws random numbers that cannot be drawn again (Python's "
                "random, numpy, a torch.Generator of its own), or changes a state in its forward, such as a counter; "
                "or the input was overwritten through .data or numpy. Draw with torch.rand without generator=, change "
                "state only if not pipework.is_recomputing(), or use checkpoint='never'"
            )

    def clear(self) -> None:
        """Drops the copies."""
        self._micro_batch, self._kept = -1, ()


def _comparable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _same(first: Tensor, second: Tensor) -> bool:
    first, second = first.detach(), second.detach()
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if torch.equal(first, second):
        return True
    if first.is_complex():
        first, second = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
    if not first.is_floating_point():
        return False
    # Kernels of an accelerator may add in any order, and those of a CPU in another one for memory that lies elsewhere.
    # That is rounding, and no reason for an error.
    tolerance = torch.finfo(first.dtype).eps ** 0.5
    if first.dtype is not torch.float64:
        first, second = first.float(), second.float()
    largest = first.abs().nan_to_num(0.0, 0.0, 0.0).amax()
    return torch.allclose(first, second, rtol=0.0, atol=tolerance * largest.item(), equal_nan=True)
