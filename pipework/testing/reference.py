"""The reference for exactness: one mini-batch on the un-pipelined model, micro-batch by micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipework.testing.random import micro_batch_random

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


@dataclass(frozen=True)
class Reference:
    """What `reference_backward` computed."""

    output: Tensor
    loss: Tensor


def reference_backward(
    model: nn.Sequential,
    inputs: Tensor | tuple[Tensor, ...],
    loss_fn: Callable[[Tensor], Tensor],
    chunks: int,
    key: int,
) -> Reference:
    """Runs forward and backward as a pipe whose loss is outside must do it, to the last bit.

    The model runs on each micro-batch; the loss is that of the concatenated outputs; the loss's gradient is cut into
    micro-batches again, and these are differentiated in ascending order. Gradients of parameters are formed for the
    whole mini-batch first, then added to what `.grad` held before.

    Args:
        model: the un-pipelined model.
        inputs: the mini-batch, rows along dimension 0; several are given to the model as positional arguments. Leaves
            that require a gradient get one.
        loss_fn: from the output of the mini-batch to a scalar.
        chunks: the pipe's.
        key: names the random numbers; see `micro_batch_random`.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> reference_backward(model, torch.randn(3, 4), torch.sum, chunks=2, key=0).output.shape
        torch.Size([3, 4])
    """
    before = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    pieces = [tensor.tensor_split(max(1, min(chunks, len(tensor)))) for tensor in tensors]
    outputs = []
    for micro_batch, rows in enumerate(zip(*pieces, strict=True)):
        with micro_batch_random(model, key, micro_batch):
            outputs.append(model(*rows))
    joined = torch.cat([output.detach() for output in outputs]).requires_grad_()
    loss = loss_fn(joined)
    torch.autograd.backward(loss)
    assert joined.grad is not None
    for output, gradient in zip(outputs, torch.split(joined.grad, [len(output) for output in outputs]), strict=True):
        if output.requires_grad:
            output.backward(gradient)
    for parameter, earlier in zip(model.parameters(), before, strict=True):
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad
    return Reference(joined.detach(), loss.detach())
