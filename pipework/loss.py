"""The loss inside of a pipe, as its user describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

from torch import nn

from pipework.runtime import values
from pipework.runtime.loss import InnerLoss, mean_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from pipework.runtime.transport import Message

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class LossSettings:
    """What the arguments of `Pipe` say of the loss.

    Attributes:
        function: from a micro-batch's output and target to its loss; None: the last layer returns the loss.
        reduction: 'mean': the mini-batch's loss is the weighted mean of its micro-batches'; 'sum': their sum.
        weight: from a micro-batch's target to its weight in the mean; None: its rows.
        grad_scaler: whose scale the gradients carry on their way through the pipe.

    Raises:
        TypeError: something is not callable, or no `GradScaler`.
        ValueError: an unknown reduction, a weight for a sum, or a function with parameters.
    """

    function: Callable[[Any, Any], Tensor] | None = None
    reduction: str = "mean"
    weight: Callable[[Any], Any] | None = None
    grad_scaler: torch.amp.GradScaler | None = None

    def __post_init__(self) -> None:
        for name, value in (("loss_fn", self.function), ("loss_weight", self.weight)):
            if value is not None and not callable(value):
                raise TypeError(f"{name} is {value!r}: wanted a function")
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"loss_reduction is {self.reduction!r}: wanted one of {', '.join(map(repr, REDUCTIONS))}")
        if self.weight is not None and self.reduction == "sum":
            raise ValueError(
                "loss_weight says what counts in a mean, but loss_reduction is 'sum': leave one of them out"
            )
        if isinstance(self.function, nn.Module) and next(self.function.parameters(), None) is not None:
            raise ValueError(
                f"loss_fn ({type(self.function).__name__}) has parameters, which the pipe would not train: make it the "
                "last layer, which takes the target as its last argument and returns the loss, and leave loss_fn out"
            )
        if self.grad_scaler is not None and not callable(getattr(self.grad_scaler, "get_scale", None)):
            raise TypeError(f"grad_scaler is {self.grad_scaler!r}: wanted a torch.amp.GradScaler")

    def place(self, device: torch.device) -> None:
        """Moves the buffers of a loss function that is a module, such as the weights of classes."""
        if isinstance(self.function, nn.Module):
            self.function.to(device)

    def inner(self, targets: Sequence[Message], rows: Sequence[int], *, grad: bool, keeps_output: bool) -> InnerLoss:
        """What the last stage of one mini-batch computes.

        Args:
            targets: of the micro-batches.
            rows: of the micro-batches.
            grad: whether gradients are wanted.
            keeps_output: whether the output is wanted, too.
        """
        return InnerLoss(
            self.function,
            None if self.reduction == "sum" else mean_weights(self._amounts(targets, rows)),
            self.grad_scaler.get_scale() if grad and self.grad_scaler is not None else 1.0,
            keeps_output,
        )

    def _amounts(self, targets: Sequence[Message], rows: Sequence[int]) -> list[float]:
        # Before the first action: a schedule may go backward with the first micro-batch before the last goes forward.
        if self.weight is None:
            return list(rows)
        amounts = []
        for number, target in enumerate(targets):
            amount = self.weight(values.unflatten(*target))
            if not (isinstance(amount, SupportsFloat) and getattr(amount, "ndim", 0) == 0):
                got = f"a tensor of shape {tuple(amount.shape)}" if hasattr(amount, "shape") else type(amount).__name__
                raise TypeError(f"loss_weight gave {got} for micro-batch {number}: wanted a number of at least 0")
            amounts.append(float(amount))
            if not amounts[-1] >= 0:
                raise ValueError(
                    f"loss_weight gave {amounts[-1]} for micro-batch {number}: wanted a number of at least 0"
                )
        return amounts
