"""Refuses `nn.utils.clip_grad_norm_` of a pipe in several processes, each of which would take another norm."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn


class ClipCheck:
    """While it is open, `nn.utils.clip_grad_norm_` raises if it is given parameters of several of these layers, or all.

    A norm of one parameter alone, or of one layer among several, is the same in any number of processes.

    Args:
        layers: returns the layers of this process at the time of a call.
    """

    def __init__(self, layers: Callable[[], Iterable[nn.Module]]) -> None:
        self._layers = layers
        refuse = weakref.WeakMethod(self._refuse)

        def check(clipped: Iterable[Any]) -> None:
            if (method := refuse()) is not None:
                method(clipped)

        weakref.finalize(self, torch_private.before_clip_grad_norm(check))

    def _refuse(self, clipped: Iterable[Any]) -> None:
        given = {id(parameter) for parameter in clipped}
        layers = [{id(parameter) for parameter in layer.parameters()} for layer in self._layers()]
        own = set().union(*layers)
        alone = len(given) == 1 or any(given <= layer for layer in layers if layer != own)
        if not alone and not given.isdisjoint(own):
            raise RuntimeError(
                "nn.utils.clip_grad_norm_ was given parameters of a pipe whose other stages are in other processes: it "
                "would take the norm of this process's gradients only, and scale each stage by another factor. Call "
                "pipe.clip_grad_norm_(max_norm) on all ranks, which takes the norm of all gradients. For a norm of "
                "these alone there are nn.utils.get_total_norm and nn.utils.clip_grads_with_norm_"
            )
