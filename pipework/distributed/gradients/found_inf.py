"""Gradients that have overflowed on one rank are made to look so on all: a gradient scaler skips steps by its own ones.

If one process skipped its step and another did not, the stages would drift apart, and so would the scales. A rank
without gradients has nothing to look at, but its scale is one of them: its scaler is shown a gradient of no concern.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from pipework import torch_private
from pipework.distributed.transport.channel import LostConnectionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipework.distributed.transport.channel import Group


class FoundInf:
    """What the ranks tell each other for their gradient scalers.

    Args:
        group: of all ranks.
        device: of this one.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group: Any = group
        self._device = device
        self._shown: dict[bool, torch.optim.Optimizer] = {}

    def share(self, scaler: Any, leaves: Sequence[Tensor]) -> None:
        """Puts an infinity among this rank's gradients if there is one, or NaN, on any rank.

        Args:
            scaler: that looks for it, a `torch.amp.GradScaler` or another.
            leaves: in whose `.grad` the gradients are.

        Raises:
            LostConnectionError: one of the ranks is gone.
        """
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        count = torch.tensor([sum(not _numbers(gradient).isfinite().all() for gradient in gradients)])
        work = self._group.allreduce(count)
        try:
            work.wait()
        except RuntimeError as error:
            raise LostConnectionError(None) from error
        happened = bool(count.item())
        numbers = next((values for values in map(_values, gradients) if values.numel()), None)
        if numbers is None:
            self._show(scaler, happened)
            # Perhaps an earlier backward has left gradients here, and the step that they are for is skipped.
            leaf = next((leaf for leaf in leaves if leaf.numel()), None) if happened else None
            if leaf is not None:
                leaf.grad = numbers = torch.zeros_like(leaf)
        if happened and numbers is not None:
            numbers[(0,) * numbers.dim()] = math.inf

    def _show(self, scaler: Any, happened: bool) -> None:
        """Lets the scaler look at a gradient that belongs to nobody, as at those of an optimizer."""
        if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
            return
        if happened not in self._shown:
            self._shown[happened] = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=self._device))])
        optimizer = self._shown[happened]
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, math.inf if happened else 0.0)
        scaler.scale(torch.zeros(1, device=self._device))  # before the first time, it has no scale
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as error:
            if "already been called" not in str(error):  # the same was shown before, and no update came since
                raise


def _numbers(gradient: Tensor) -> Tensor:
    """All numbers of a gradient, once what belongs to the same place is added up."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _values(gradient: Tensor) -> Tensor:
    """The same as they lie in memory."""
    return torch_private.sparse_values(gradient) if gradient.is_sparse else gradient
