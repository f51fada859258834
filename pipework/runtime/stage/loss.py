"""The loss inside of the pipe, which the last stage computes for each micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.values.nested import Structure


@dataclass(frozen=True)
class InnerLoss:
    """Computes a micro-batch's part of the mini-batch's loss from its output.

    Attributes:
        function: from output and target to the loss; None: the last layer takes the target as its last positional
            argument and returns the loss.
        weights: the factor of each micro-batch's loss; None: none has one.
        scale: gradients carry this factor, so that small ones survive in float16.
        keeps_output: whether the output is returned with the loss.
        micro_batches: how many there are.
    """

    function: Callable[[Any, Any], Tensor] | None
    weights: tuple[float, ...] | None = None
    scale: float = 1.0
    keeps_output: bool = False
    micro_batches: int = 1

    @cached_property
    def counted(self) -> frozenset[int]:
        """The micro-batches whose loss has a weight other than 0."""
        numbers = range(self.micro_batches)
        return frozenset([n for n in numbers if self.weights is None or self.weights[n]])

    @property
    def source(self) -> str:
        """What returns the loss, for messages."""
        return "the last layer" if self.function is None else f"loss_fn ({self.description})"

    @property
    def description(self) -> str:
        """The name of the function, for messages."""
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    def scale_in(self, dtype: torch.dtype) -> float:
        """The scale, rounded to the dtype of the loss."""
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

    def outputs(self, output: Any, part: Tensor) -> tuple[tuple[Tensor, ...], Structure | None]:
        """The outputs of the last stage: the loss, then the output without its graph if it is kept."""
        if not self.keeps_output:
            return (part,), None
        tensors, structure = nested.flatten(output)
        return (part, *(tensor.detach() for tensor in tensors)), structure


def mean_weights(amounts: Sequence[float]) -> tuple[float, ...]:
    """Each micro-batch's share in a mean; NaN if the amounts sum to 0, as for every mean over nothing.

    Example:
        >>> mean_weights([3, 1])
        (0.75, 0.25)
    """
    total = sum(amounts)
    return tuple([amount / total if total else math.nan for amount in amounts])


def total(parts: Sequence[Tensor]) -> Tensor:
    """The mini-batch's loss: its parts, added in the order of the micro-batches."""
    loss, *others = parts
    loss = loss.detach()
    with torch.no_grad():  # cheaper than detaching each part
        for part in others:
            loss = loss + part
    return loss
