"""Refuses `nn.utils.clip_grad_norm_` on a part of a pipe's parameters, where each process would take another norm."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor


class ClipCheck:
    """While it is open, `nn.utils.clip_grad_norm_` raises if it is given one of these parameters.

    Args:
        parameters: returns the parameters of this process at the time of a call.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        refuse = weakref.WeakMethod(self._refuse)

        def check(clipped: Iterable[Any]) -> None:
            if (method := refuse()) is not None:
                method(clipped)

        weakref.finalize(self, torch_private.before_clip_grad_norm(check))

    def _refuse(self, clipped: Iterable[Any]) -> None:
        own = {id(parameter) for parameter in self._parameters()}
        if any(id(parameter) in own for parameter in clipped):
            raise RuntimeError(
                "nn.utils.clip_grad_norm_ was given parameters of a pipe whose other stages are in other processes: it "
                "would take the norm of this process's gradients only, and scale each stage by another factor. Call "
                "pipe.clip_grad_norm_(max_norm) on all ranks, which takes the norm of all gradients"
            )
