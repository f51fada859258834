"""An overflow on one rank is copied to all, since a gradient scaler decides by the gradients of its own process.

If one process skipped its step and another did not, the stages would drift apart, and so would their scales. A rank
without gradients has a scale, too: its scaler is given a gradient that belongs to no parameter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from pipework import torch_private
from pipework.distributed.transport.groups import any_of
from pipework.values.dtensor import local_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipework.distributed.transport.groups import Group


class FoundInf:
    """Shares overflows between the gradient scalers of some ranks.

    Args:
        group: of all ranks of the job: of a sharded gradient, one alone may have the overflow.
        device: of this rank.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._optimizers: dict[bool, torch.optim.Optimizer] = {}

    def share(self, scaler: Any, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Puts an infinity into this rank's gradients if there is an infinity or NaN in those of any rank.

        Args:
            scaler: a `torch.amp.GradScaler` or another one.
            leaves: the tensors in whose `.grad` a gradient may be put.
            gradients: of each of them, or of its shard.

        Raises:
            LostConnectionError: one of the ranks is gone.
        """
        present = [local_part(gradient) for gradient in gradients if gradient is not None]
        # A sparse gradient adds up its values of the same index first.
        summed = (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in present)
        happened = any_of(self._group, any(not values.isfinite().all() for values in summed))
        in_place = (torch_private.sparse_values(each) if each.is_sparse else each for each in present)
        numbers = next((values for values in in_place if values.numel()), None)
        if numbers is None:
            self._show(scaler, happened)
            # An earlier backward may have left gradients here, and the step that uses them is skipped on all ranks.
            leaf = next((leaf for leaf in leaves if leaf.numel()), None) if happened else None
            if leaf is not None:
                leaf.grad = numbers = torch.zeros_like(leaf)
        if happened and numbers is not None:
            numbers[(0,) * numbers.dim()] = math.inf

    def _show(self, scaler: Any, happened: bool) -> None:
        """Has the scaler inspect a gradient that belongs to no parameter, as those of an optimizer."""
        if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
            return
        if happened not in self._optimizers:
            self._optimizers[happened] = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=self._device))])
        optimizer = self._optimizers[happened]
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, math.inf if happened else 0.0)
        scaler.scale(torch.zeros(1, device=self._device))  # it has no scale before the first call
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as error:
            if "already been called" not in str(error):  # in the same step, before its update
                raise
