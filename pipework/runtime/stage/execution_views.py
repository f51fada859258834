"""Execution views: shallow copies of modules that several stages run.

Two workers that put their aliases into one module object would replace each other's. A view is a shallow copy of the
module tree with the same buffers, hooks and attributes, but dictionaries of its own.
"""

from __future__ import annotations

from collections import Counter
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class View:
    """A view of one layer, kept equal to it by `refresh`.

    Its copies and their dictionaries stay the same objects: more than one mini-batch may be in flight, and each refers
    to the dictionaries into which it puts its aliases.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self._build()
        self.refresh()

    def refresh(self) -> None:
        """Takes over the layer's changes since the last mini-batch: flags, attributes, parameters, children."""
        if [id(module) for module in self._layer.modules()] != self._tree:
            self._build()
        for original, copy in self._pairs:
            own = {name: copy.__dict__[name] for name in ("_modules", "_buffers", "_parameters")}
            copy.__dict__.clear()
            copy.__dict__.update(original.__dict__)
            copy.__dict__.update(own)
            for mine, theirs in ((copy._parameters, original._parameters), (copy._buffers, original._buffers)):
                mine.clear()
                mine.update(theirs)  # type: ignore[arg-type]
            if (forward := original.__dict__.get("forward")) is not None and hasattr(forward, "__func__"):
                copy.__dict__["forward"] = MethodType(forward.__func__, copy)
        self._remember()

    def hand_back(self) -> None:
        """After a run: gives the layer the attributes and buffers that its view has assigned.

        The others stay: the user may have changed them, or another stage's view of the same layer.
        """
        for (original, copy), (attributes, buffers) in zip(self._pairs, self._seen, strict=True):
            original.__dict__.update(_changed(copy.__dict__, attributes))
            original._buffers.update(_changed(copy._buffers, buffers))
        self._remember()

    def _remember(self) -> None:
        self._seen = [(dict(copy.__dict__), dict(copy._buffers)) for _, copy in self._pairs]

    def _build(self) -> None:
        """Copies the present modules; those that have a copy keep it."""
        earlier = {id(original): copy for original, copy in self._pairs}
        modules = list(self._layer.modules())
        self._tree = [id(module) for module in modules]
        self._pairs = [
            (module, earlier[id(module)] if id(module) in earlier else _empty_copy(module)) for module in modules
        ]
        copies = {id(original): copy for original, copy in self._pairs}
        for original, copy in self._pairs:
            copy._modules.clear()
            copy._modules.update(
                {name: None if child is None else copies[id(child)] for name, child in original._modules.items()}
            )
        self.module = copies[id(self._layer)]


def _changed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in now.items() if name not in before or before[name] is not value}


def _empty_copy(module: nn.Module) -> nn.Module:
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(_modules={}, _buffers={}, _parameters={})
    return copy


def shared_modules(stages: Sequence[Iterable[nn.Module]]) -> set[int]:
    """The ids of all modules that are reached from more than one stage."""
    reached: Counter[int] = Counter()
    for layers in stages:
        reached.update({id(module) for layer in layers for module in layer.modules()})
    return {identity for identity, count in reached.items() if count > 1}


def refuse_shared_statistics(stages: Sequence[Iterable[nn.Module]]) -> None:
    """Raises a ValueError if two stages would update the statistics of one norm, in no fixed order."""
    shared = shared_modules(stages)
    for layers in stages:
        for layer in layers:
            for name, module in layer.named_modules():
                norm = isinstance(module, torch_private.StatisticsNorm) and module.track_running_stats
                if norm and id(module) in shared:
                    raise ValueError(
                        f"{type(module).__name__} {name!r} is used in two partitions, which would update its running "
                        "statistics at the same time; put them into one partition by another balance, use "
                        "two norms, or track_running_stats=False"
                    )


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
