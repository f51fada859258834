"""Execution views: what a stage runs in place of a module that another stage runs too.

Two workers that put their own leaves into the slots of one module object would take them from each other. A view is
a shallow copy of the module tree: the same buffers, hooks and attributes, but slots of its own.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


class View:
    """A view of one layer, kept equal to it by `refresh`."""

    def __init__(self, layer: nn.Module) -> None:
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self.module = self._copy(layer, {})
        self.refresh()

    def refresh(self) -> None:
        """Takes over what changed in the layer since the last mini-batch: flags, attributes, parameters."""
        for original, copy in self._pairs:
            children, buffers = copy.__dict__["_modules"], copy.__dict__["_buffers"]
            copy.__dict__.update(original.__dict__)
            copy.__dict__["_modules"] = children
            copy.__dict__["_parameters"] = dict(original._parameters)
            slots = copy.__dict__["_buffers"] = buffers
            slots.update(original._buffers)

    def _copy(self, module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
        if id(module) not in copies:
            copy = copies[id(module)] = module.__class__.__new__(module.__class__)
            copy.__dict__["_modules"] = {
                name: None if child is None else self._copy(child, copies) for name, child in module._modules.items()
            }
            copy.__dict__["_buffers"] = {}  # one dictionary for good: what is known of buffers is known of their slots
            self._pairs.append((module, copy))
        return copies[id(module)]


def shared_modules(stages: Sequence[Sequence[nn.Module]]) -> set[int]:
    """The ids of all modules that are reached from more than one stage."""
    reached: Counter[int] = Counter()
    for layers in stages:
        reached.update({id(module) for layer in layers for module in layer.modules()})
    return {identity for identity, count in reached.items() if count > 1}


def execution_layers(layers: Sequence[nn.Module], shared: set[int]) -> tuple[list[nn.Module], list[View]]:
    """The layers as a stage runs them, and the views among them."""
    views: dict[int, View] = {}
    runnable = []
    for layer in layers:
        if any(id(module) in shared for module in layer.modules()):
            view = views.setdefault(id(layer), View(layer))
            runnable.append(view.module)
        else:
            runnable.append(layer)
    return runnable, list(views.values())
