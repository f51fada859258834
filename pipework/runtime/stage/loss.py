"""The loss inside of the pipe, which the last stage computes for each micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.runtime.transport import Message
    from pipework.values.nested import Structure


class SeenLoss(NamedTuple):
    """What a loss function got and gave for a micro-batch, copied: it may overwrite its arguments.

    Attributes:
        output: what it got.
        target: likewise.
        places: where the tensors of the target lie that were copied.
        value: what it gave.
    """

    output: Message
    target: Message
    places: tuple[int, ...]
    value: Tensor


@dataclass  # not frozen: made for each step, and a frozen one takes twice as long
class InnerLoss:
    """Computes a micro-batch's part of the mini-batch's loss from its output.

    Attributes:
        function: from output and target to the loss; None: the last layer takes the target as its last positional
            argument and returns the loss.
        weights: the factor of each micro-batch's loss, with the call's `loss_scale`; None: none has one. A tensor is on
            the device of the loss: the caller's stream computes it, and the host may not know its value yet.
        scale: gradients carry this factor, so that small ones survive in float16; a tensor as for a weight.
        keeps_output: whether the output is returned with the loss.
        micro_batches: how many there are.
        seen: gets the first two micro-batches; None: not in this mini-batch.
    """

    function: Callable[[Any, Any], Tensor] | None
    weights: tuple[float | Tensor, ...] | None = None
    scale: float | Tensor = 1.0
    keeps_output: bool = False
    micro_batches: int = 1
    seen: list[SeenLoss] | None = None

    @cached_property
    def counted(self) -> frozenset[int]:
        """The micro-batches whose loss has a weight other than 0, as far as is known without waiting for a device."""
        weights = self.weights or (1.0,) * self.micro_batches
        return frozenset([n for n, weight in enumerate(weights) if isinstance(weight, Tensor) or weight])

    @property
    def source(self) -> str:
        """What returns the loss, for messages."""
        return "the last layer" if self.function is None else f"loss_fn ({self.description})"

    @property
    def description(self) -> str:
        """The name of the function, for messages."""
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    def scale_in(self, dtype: torch.dtype) -> float | Tensor:
        """The scale, rounded to the dtype of the loss."""
        if isinstance(self.scale, Tensor):
            return self.scale.to(dtype)
        if self.scale == 1.0:
            return 1.0
        return torch.full((), self.scale, dtype=dtype, device="cpu").item()

    def part(self, value: Any, micro_batch: int) -> Tensor:
        """The micro-batch's part of the loss: the computed value times its weight.

        Args:
            value: returned by the function, or by the last layer.
            micro_batch: its number.

        Raises:
            TypeError: the value is no tensor.
            ValueError: the tensor is not 0-dimensional.
        """
        if not isinstance(value, Tensor) or value.dim() or value.is_complex():
            raise self._no_loss(value)
        if self.weights is None:
            return value
        weight = self.weights[micro_batch]
        if isinstance(weight, Tensor):
            return torch.where(weight == 0, 0.0, _times(value, weight))
        # A weight of 0 gives 0: the mean over no element is NaN, and so is 0 x NaN.
        return value * weight if weight else value.new_zeros(())

    def _no_loss(self, value: Any) -> TypeError | ValueError:
        source = self.source
        if not isinstance(value, Tensor):
            if self.function is None:
                hint = "give the pipe a loss_fn, or let its last layer take the target and return the loss"
            elif isinstance(value, bool | int | float):
                hint = "return the tensor itself, without .item() or float()"
            else:
                hint = "it may lack a return" if value is None else "return the loss alone"
            return TypeError(
                f"{source} returned {type(value).__name__}, wanted the loss as a 0-dimensional tensor: {hint}"
            )
        if value.is_complex():
            return TypeError(
                f"{source} returned a complex loss ({value.dtype}), wanted a real one: take .abs() or .real"
            )
        return ValueError(
            f"{source} returned a tensor of shape {tuple(value.shape)}, wanted a 0-dimensional loss: reduce it, "
            "for example with reduction='mean', or with .mean()"
        )

    def with_output(self, part: Tensor, output: Any) -> tuple[tuple[Tensor, ...], Structure | None]:
        """The outputs of the last stage if its output is kept: the loss, then the output without its graph."""
        tensors, structure = nested.flatten(output)
        return (part, *(tensor.detach() for tensor in tensors)), structure


def _times(loss: Tensor, weight: Tensor) -> Tensor:
    """The product that a number would give: it is not rounded to 16 bits before it multiplies."""
    wide = torch.promote_types(loss.dtype, torch.float32)
    return (loss.to(wide) * weight.to(wide)).to(loss.dtype)


def mean_weights(amounts: Sequence[float] | Tensor) -> tuple[float | Tensor, ...]:
    """Each micro-batch's share in a mean; NaN if the amounts sum to 0, as for every mean over nothing.

    Args:
        amounts: how much each micro-batch counts; a tensor stays on its device.

    Example:
        >>> mean_weights([3, 1])
        (0.75, 0.25)
    """
    if isinstance(amounts, Tensor):
        # Not every device has float64. Integers below 2^24 give the same share if they are divided in float32.
        wide = amounts.to(torch.float32 if amounts.device.type == "mps" else torch.float64)
        return (wide / wide.sum()).unbind()
    total = sum(amounts)
    return tuple([amount / total if total else math.nan for amount in amounts])


def total(parts: Sequence[Tensor]) -> Tensor:
    """The mini-batch's loss: its parts, added in the order of the micro-batches."""
    loss, *others = parts
    loss = loss.detach()
    if others:
        with torch.no_grad():  # cheaper than detaching each part
            for part in others:
                loss = loss + part
    return loss
