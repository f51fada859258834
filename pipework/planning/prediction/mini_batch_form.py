"""The form of a mini-batch: its largest micro-batch, and the bytes of its inputs and targets on each device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework.values.tensor_form import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from pipework.model.mini_batch import MiniBatch
    from pipework.runtime.transport import Message


def largest_micro_batch(split: MiniBatch) -> int:
    """The number of the micro-batch with the most bytes."""
    sizes = [_bytes_of(tensors) for tensors, _ in split.micro_batches]
    return sizes.index(max(sizes))


def batch_bytes(
    split: MiniBatch, targets: Sequence[Message] | None, devices: Sequence[torch.device]
) -> tuple[tuple[torch.device, int], ...]:
    """The devices of the mini-batch's inputs, and of its targets if there are any, and their bytes."""
    of_inputs = (devices[0], _bytes_of(split.tensors))
    if targets is None:
        return (of_inputs,)
    return of_inputs, (devices[-1], sum(_bytes_of(tensors) for tensors, _ in targets))


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(map(bytes_of, tensors))
