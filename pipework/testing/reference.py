"""The reference for exactness: one mini-batch on the un-pipelined model, micro-batch by micro-batch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipework.autograd.aliases import SharedMemory
from pipework.model.marks import MicroBatches
from pipework.testing.random import micro_batch_random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn


@dataclass(frozen=True)
class Reference:
    """What `reference_backward` or `reference_step` computed: the output and the loss of the mini-batch."""

    output: Any
    loss: Tensor


def reference_backward(
    model: nn.Sequential,
    inputs: Any,
    loss_fn: Callable[[Any], Tensor],
    chunks: int,
    key: int,
) -> Reference:
    """Runs forward and backward like a pipe with the loss outside, to the last bit.

    The model runs on each micro-batch; the loss is that of the concatenated outputs; the loss's gradient is cut into
    micro-batches again, and their backwards run in ascending order. Gradients of parameters are summed over the
    whole mini-batch first, and then added to the former `.grad`.

    Args:
        model: the un-pipelined model.
        inputs: the mini-batch, rows along dimension 0, or `MicroBatches`; a tuple of several is given to the model as
            positional arguments. Leaves that require a gradient get one.
        loss_fn: from the output of the mini-batch, as the pipe returns it, to a scalar.
        chunks: of the pipe.
        key: of the random numbers; see `micro_batch_random`.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> reference_backward(model, torch.randn(3, 4), torch.sum, chunks=2, key=0).output.shape
        torch.Size([3, 4])
    """
    with gradients_added(model) as memory:
        outputs = []
        for micro_batch, rows in enumerate(micro_batches(inputs, chunks)):
            with micro_batch_random(model, key, micro_batch):
                outputs.append(model(*rows))
        whole = joined([output.detach() for output in outputs], inputs)
        leaves = [leaf.requires_grad_() for leaf in (whole if isinstance(whole, MicroBatches) else [whole])]
        made: list[list[Tensor]] = [[] for _ in leaves]
        for leaf, own in zip(leaves, made, strict=True):
            leaf.register_hook(own.append)  # `leaf.grad` may be a copy with other strides
        loss = loss_fn(whole)
        torch.autograd.backward(loss)
        gradients: Sequence[Any] = [own[0] if own else None for own in made]
        if not isinstance(whole, MicroBatches):
            gradients = torch.split(gradients[0], [len(output) for output in outputs])
        for output, gradient in zip(outputs, gradients, strict=True):
            if output.requires_grad:
                output.backward(gradient)
                memory.separate()
    return Reference(joined([output.detach() for output in outputs], inputs), loss.detach())


def joined(outputs: Sequence[Tensor], inputs: Any) -> Any:
    """The outputs of the micro-batches, concatenated or as `MicroBatches`, as the inputs are."""
    if _given(inputs):
        return MicroBatches(outputs)
    return torch.cat(list(outputs)) if len(outputs) > 1 else outputs[0]  # as a pipe does, with the output's strides


def _given(inputs: Any) -> list[MicroBatches]:
    every = inputs if isinstance(inputs, tuple) else (inputs,)
    return [each for each in every if isinstance(each, MicroBatches)]


def micro_batches(inputs: Any, chunks: int) -> list[tuple[Any, ...]]:
    """The positional arguments of each micro-batch.

    Example:
        >>> [len(rows) for rows, in micro_batches(torch.zeros(9, 2), 4)]
        [3, 2, 2, 2]
    """
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    if given := _given(inputs):
        whole = [each if isinstance(each, MicroBatches) else [each] * len(given[0]) for each in tensors]
        return list(zip(*whole, strict=True))
    return list(zip(*(tensor.tensor_split(max(1, min(chunks, len(tensor)))) for tensor in tensors), strict=True))


@contextlib.contextmanager
def gradients_added(model: nn.Module) -> Iterator[SharedMemory]:
    """A context; at its end the gradients that were computed in it are added to the former ones, in one addition.

    It gives what is to be called after each backward.
    """
    before = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    yield SharedMemory(list(model.parameters()))
    for parameter, earlier in zip(model.parameters(), before, strict=True):
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad
