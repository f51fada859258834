"""The state of modules before a run, to be put back: flags, attributes, buffers, hooks. Parameters are not copied."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable


_CONTAINERS: Final = (dict, OrderedDict, defaultdict, list, set, deque)


class ModuleStates:
    """What modules and their attributes hold now; of tensors that are no parameters also their values.

    Lists, dicts, sets and deques keep their identity and get back their elements, at any depth. Other objects that an
    attribute refers to are left alone.

    Args:
        modules: each with all modules below it.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> kept = ModuleStates([layer])
        >>> _ = layer.eval().running_mean.fill_(5.0)
        >>> kept.put_back()
        >>> layer.training, layer.running_mean
        (True, tensor([0., 0.]))
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        seen: set[int] = set()
        for module in modules:
            for each in module.modules():
                self._keep(vars(each), seen)

    def _keep(self, value: Any, seen: set[int]) -> None:
        if id(value) in seen or isinstance(value, nn.Parameter | nn.Module):
            return
        if isinstance(value, Tensor):
            seen.add(id(value))
            if not value.is_meta and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__:
                self._tensors.append((value, value.detach().clone()))
        elif type(value) in _CONTAINERS:
            seen.add(id(value))
            self._containers.append((value, copy.copy(value)))
            for each in value.values() if isinstance(value, dict) else value:
                self._keep(each, seen)

    def put_back(self) -> None:
        """Gives the modules what they had. A tensor with the same values is not written to: a graph may need it."""
        for container, before in self._containers:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(before)
        with torch.no_grad():
            for tensor, before in self._tensors:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
