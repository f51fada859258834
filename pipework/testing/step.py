"""The reference for a loss inside: one mini-batch on the un-pipelined model, micro-batch by micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework.model.marks import MicroBatches
from pipework.model.sequential import tuple_rule
from pipework.testing.random import micro_batch_random
from pipework.testing.reference import Reference, gradients_added, joined, micro_batches
from pipework.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def reference_step(
    model: nn.Sequential,
    inputs: Any,
    target: Any,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    chunks: int,
    key: int,
    *,
    loss_reduction: str = "mean",
    loss_weight: Callable[[Any], Any] | None = None,
    loss_scale: float = 1.0,
) -> Reference:
    """Runs forward and backward like `pipe(*inputs, target=target)` with any schedule, to the last bit.

    For each micro-batch in turn: the model, the loss, `(loss * (rows / all rows)).backward()`. The loss of the
    mini-batch is the sum of these products, in that order. Gradients of parameters are summed over the whole
    mini-batch first, and then added to the former `.grad`.

    Args:
        model: the un-pipelined model.
        inputs: the mini-batch, rows along dimension 0, or `MicroBatches`; a tuple of several is given to the model as
            positional arguments. Leaves that require a gradient get one.
        target: any nested structure, whose tensors are split like the inputs, or `MicroBatches`.
        loss_fn: of the pipe; None: the model's last layer takes the target, too, and returns the loss.
        chunks: of the pipe.
        key: of the random numbers; see `micro_batch_random`.
        loss_reduction: of the pipe.
        loss_weight: of the pipe.
        loss_scale: of the call; it multiplies each micro-batch's factor.

    Returns:
        The loss and the joined outputs; without a `loss_fn` there are no outputs.

    Example:
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> from pipework.testing import draw_key
        >>> model, x, y = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(5, 4), torch.randn(5, 4)
        >>> mse_loss = nn.functional.mse_loss
        >>> pipe = Pipe(model, 3, balance=[1, 1], devices=["cpu", "cpu"], schedule="1f1b", loss_fn=mse_loss)
        >>> _ = torch.manual_seed(1)
        >>> reference = reference_step(model, x, y, mse_loss, chunks=3, key=draw_key())
        >>> _ = torch.manual_seed(1)
        >>> torch.equal(pipe(x, target=y), reference.loss)
        True
    """
    pieces = micro_batches(inputs, chunks)
    targets = list(_split(target, len(pieces)))
    if loss_reduction == "sum":
        factors: Sequence[float] = [1.0] * len(pieces)
    else:
        amounts = [len(rows[0]) for rows in pieces] if loss_weight is None else [float(loss_weight(t)) for t in targets]
        factors = [amount / sum(amounts) for amount in amounts]
    factors = [factor * loss_scale for factor in factors]
    parts, outputs = [], []
    with gradients_added(model) as memory:
        for number, (rows, its_target, factor) in enumerate(zip(pieces, targets, factors, strict=True)):
            # A loss function draws from the stream of one more layer.
            with micro_batch_random(model, key, number):
                loss, output = _loss(model, rows, its_target, loss_fn)
            part = loss * factor
            if factor == 0.0:  # a mean over no element is NaN, and 0 * NaN is NaN, too
                part = loss.new_zeros(())
            if part.requires_grad:
                torch.autograd.backward(part)
                memory.separate()
            parts.append(part.detach())
            outputs.append(output)
    total, *others = parts
    for part in others:
        total = total + part
    return Reference(None if loss_fn is None else joined([output.detach() for output in outputs], inputs), total)


def _loss(
    model: nn.Sequential, inputs: tuple[Tensor, ...], target: Any, loss_fn: Callable[[Any, Any], Tensor] | None
) -> tuple[Tensor, Any]:
    if loss_fn is not None:
        output = model(*inputs)
        return loss_fn(output, target), output
    value: Any = inputs if len(inputs) > 1 else inputs[0]
    if len(model) > 1:
        value = model[:-1](*inputs)
    return model[-1](*tuple_rule(model).arguments(value, model[-1], 1), target), None


def _split(target: Any, count: int) -> Iterator[Any]:
    """The target of each micro-batch."""
    if isinstance(target, MicroBatches):
        yield from target
        return
    for number in range(count):
        yield pytree.tree_map(
            lambda leaf, number=number: leaf.tensor_split(count)[number] if isinstance(leaf, Tensor) else leaf, target
        )
