"""Copies of modules on the meta device, which need no memory anywhere."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterable


def meta_copy(value: Any, modules: Iterable[nn.Module]) -> Any:
    """A deep copy of a value, whose tensors have no memory. Those that `modules` share are shared by their copies.

    Args:
        value: modules among anything else.
        modules: all modules in it.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> meta_copy(layer, [layer]).weight
        Parameter containing:
        tensor(..., device='meta', size=(2, 2), requires_grad=True)
    """
    memo: dict[int, Any] = {}
    for module in modules:
        for parameter in module.parameters():
            memo[id(parameter)] = nn.Parameter(_twin(parameter), parameter.requires_grad)
        memo |= {id(buffer): _twin(buffer) for buffer in module.buffers()}
    with _Twins():
        return copy.deepcopy(value, memo)


class _Twins(TorchFunctionMode):
    """Copies no tensor's memory: a tensor may also be an attribute that is neither parameter nor buffer."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gives a tensor on the meta device for a copy of any other."""
        if func in (Tensor.__deepcopy__, Tensor.clone):
            return _twin(args[0])  # the mode is off in here
        return func(*args, **(kwargs or {}))


def _twin(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta")
