"""The form of a mini-batch: its largest micro-batch, and the bytes of its inputs and targets on each device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipework.model.given import WHOLE, Given
from pipework.model.microbatch import arguments_of
from pipework.planning.prediction.stage_copy import Sample
from pipework.values import nested
from pipework.values.tensor_form import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.microbatch import Split
    from pipework.model.tuples import TupleRule
    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.transport import Message


def largest_micro_batch(split: Split | Given) -> int:
    """The number of the micro-batch with the most bytes."""
    sizes = [_bytes_of(tensors) for tensors, _ in split.micro_batches]
    return sizes.index(max(sizes))


def batch_bytes(
    split: Split | Given, targets: Sequence[Message] | None, devices: Sequence[torch.device]
) -> tuple[tuple[torch.device, int], ...]:
    """The devices of the mini-batch's inputs, and of its targets if there are any, and their bytes."""
    of_inputs = (devices[0], _bytes_of(split.tensors))
    if targets is None:
        return (of_inputs,)
    return of_inputs, (devices[-1], sum(_bytes_of(tensors) for tensors, _ in targets))


@dataclass(frozen=True)
class MiniBatchForm:
    """The largest micro-batch of a mini-batch, on the meta device, and what is known of the others.

    Attributes:
        tensors: of the micro-batch.
        structure: around them.
        dims: for each tensor the dimension of the rows of the micro-batch; `WHOLE`: it has no rows of its own.
        rows: of the mini-batch; 0: the caller has made the micro-batches.
        micro_batches: how many there are.
        batch: devices of the mini-batch's inputs and targets, and their bytes.
        target: likewise, for the loss; None: the loss is outside.
    """

    tensors: tuple[Tensor, ...]
    structure: Any
    dims: tuple[int, ...]
    rows: int
    micro_batches: int
    batch: tuple[tuple[torch.device, int], ...]
    target: tuple[tuple[Tensor, ...], Any] | None = None

    @classmethod
    def of(
        cls, split: Split | Given, targets: Sequence[Message] | None, devices: Sequence[torch.device]
    ) -> MiniBatchForm:
        """The call with these micro-batches and targets."""
        largest = largest_micro_batch(split)
        tensors, structure = split.micro_batches[largest]
        target = None
        if targets is not None:
            target = tuple(map(_on_meta, targets[largest][0])), targets[largest][1]
        return cls(
            tuple(map(_on_meta, tensors)),
            structure,
            (WHOLE,) * len(tensors) if isinstance(split, Given) else tuple(split.dims),
            0 if split.is_given else sum(split.rows),
            len(split.rows),
            batch_bytes(split, targets, devices),
            target,
        )

    def sample(self, micro_batches: int, tuples: TupleRule, loss: InnerLoss | None) -> Sample:
        """The largest of so many micro-batches."""
        before, rows = -(-self.rows // self.micro_batches), -(-self.rows // micro_batches)
        tensors = [_cut(each, rows, dim) for each, dim in zip(self.tensors, self.dims, strict=True)]
        arguments, keywords = arguments_of((tuple(tensors), self.structure))
        if self.target is None:
            return Sample(arguments, keywords, tuples=tuples)
        whole, structure = self.target
        target = [_cut(each, rows, 0 if self.rows and each.shape[:1] == (before,) else WHOLE) for each in whole]
        return Sample(arguments, keywords, loss, nested.unflatten(tuple(target), structure), tuples)


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(map(bytes_of, tensors))


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def _cut(tensor: Tensor, rows: int, dim: int) -> Tensor:
    if dim == WHOLE:
        return tensor
    shape = (*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :])
    return torch.empty(shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)
