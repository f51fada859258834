"""The factor by which the gradients of a loss inside are still to be multiplied.

A pipe computes the gradients with the loss. If the user calls `(loss / 4).backward()` later, autograd gives the loss
the gradient 1/4, and the factor is 1/4 over the scale with which the pipe has computed. On the CPU the factor is a
number, mostly 1: then there is nothing to multiply. On an accelerator the host would wait for the whole mini-batch
before it could read the number. So the factor stays on the device, and multiplies the gradients even if it is 1.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from torch import Tensor


class Factor:
    """The factor of all gradients of a mini-batch.

    Args:
        value: a number, or a 0-dimensional tensor on an accelerator that the current stream has computed.

    Example:
        >>> Factor(0.5).times([torch.ones(2), None], keep=True)
        [tensor([0.5000, 0.5000]), None]
    """

    def __init__(self, value: float | Tensor) -> None:
        self._tensor = value if isinstance(value, torch.Tensor) else None
        if isinstance(value, torch.Tensor):
            # Each stage's gradients are multiplied in the stream that takes them, perhaps on another thread.
            self._stream = torch.accelerator.current_stream(value.device)
            self._known = self._stream.record_event()
        else:
            self.number = value

    @classmethod
    def of(cls, gradient: Tensor, scale: float | Tensor) -> Self:
        """The factor of gradients that were computed with `scale`, if the user's backward gives the loss `gradient`.

        Example:
            >>> Factor.of(torch.tensor(2.0), scale=2.0).is_one
            True
        """
        if gradient.is_meta:
            return cls(1.0)
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or gradient.device.type != accelerator.type:
            return cls(float(gradient) / float(scale))
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return cls(wide if not isinstance(scale, torch.Tensor) and scale == 1.0 else wide / scale)

    @property
    def is_on_host(self) -> bool:
        """Whether `number` waits for no accelerator."""
        return self._tensor is None

    @cached_property
    def number(self) -> float:
        """The factor itself; the host waits for one that is still being computed on an accelerator."""
        assert self._tensor is not None
        self._known.synchronize()
        return float(self._tensor)

    @property
    def is_one(self) -> bool:
        """Whether it is known to be 1."""
        return self._tensor is None and self.number == 1.0

    def times(self, gradients: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """The gradients, multiplied.

        Args:
            gradients: what to multiply; None stays None.
            keep: leave the tensors as they are, and return others.
        """
        if self.is_one and not keep:
            return list(gradients)
        devices = {gradient.device for gradient in gradients if gradient is not None}
        factors = {device: self._on(device) for device in devices}
        if not keep and self._multiplied_at_once(gradients, factors):
            return list(gradients)
        return [
            None if gradient is None else _multiplied(gradient, factors[gradient.device], keep=keep)
            for gradient in gradients
        ]

    def _on(self, device: torch.device) -> float | Tensor:
        """The factor for gradients on a device, ready for its current stream."""
        if self._tensor is None or self._tensor.device.type != device.type:
            return self.number
        stream = torch.accelerator.current_stream(self._tensor.device)
        if stream != self._stream:
            stream.wait_event(self._known)
            self._tensor.record_stream(stream)
        return self._tensor.to(device, non_blocking=True)

    def _multiplied_at_once(
        self, gradients: Sequence[Tensor | None], factors: dict[torch.device, float | Tensor]
    ) -> bool:
        """Multiplies in place by few kernels, if the gradients are of the usual kind."""
        present = [gradient for gradient in gradients if gradient is not None]
        if len(factors) != 1 or not all(map(_usual, present)):
            return False
        (factor,) = factors.values()
        if not isinstance(factor, torch.Tensor):
            return False
        torch_private.multiply_each(present, factor)
        return True


def _usual(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.dtype in (torch.float32, torch.float64)


def _multiplied(gradient: Tensor, factor: float | Tensor, *, keep: bool) -> Tensor:
    if not isinstance(factor, torch.Tensor):
        return gradient * factor if keep else gradient if factor == 1.0 else gradient.mul_(factor)
    if gradient.layout is not torch.strided or gradient.is_complex() or _usual(gradient):
        return gradient * factor
    # A tensor would be rounded to 16 bits before it multiplies, and a number is not.
    product = (gradient.to(factor.dtype) * factor).to(gradient.dtype)
    return product if keep else gradient.copy_(product)
