"""Execution views: shallow copies of modules that several stages run.

Two workers that put their aliases into one module object would overwrite the aliases of each other. A view is a shallow
copy of the module tree with the same buffers, hooks and attributes, but dictionaries of its own. A module that contains
no shared module is not copied: code that `torch.compile` made for a module runs that module, and not its copy.
"""

from __future__ import annotations

from collections import Counter
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


class View:
    """A view of one layer, kept equal to it by `refresh`.

    Its copies and their dictionaries stay the same objects: more than one mini-batch may be in flight, and each refers
    to the dictionaries into which it puts its aliases.

    Args:
        layer: of one stage.
        shared: the identities of modules that other stages run, too.
    """

    def __init__(self, layer: nn.Module, shared: Collection[int]) -> None:
        self._layer = layer
        self._shared = shared
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
            if torch_private.is_compiled(original):
                torch_private.run_uncompiled(copy)
        self._remember()

    def hand_back(self) -> None:
        """After a run: gives the layer the attributes and buffers that its view has assigned.

        Others stay as they are: the user may have changed them, or another stage's view of the same layer.
        """
        for (original, copy), (attributes, buffers) in zip(self._pairs, self._seen, strict=True):
            original.__dict__.update(_changed(copy.__dict__, attributes))
            original._buffers.update(_changed(copy._buffers, buffers))
        self._remember()

    def _remember(self) -> None:
        self._seen = [(dict(copy.__dict__), dict(copy._buffers)) for _, copy in self._pairs]

    def _build(self) -> None:
        """Copies the present modules; a module that has a copy keeps it."""
        earlier = {id(original): copy for original, copy in self._pairs}
        modules = list(self._layer.modules())
        self._tree = [id(module) for module in modules]
        modules = self._copied(modules)
        self._pairs = [
            (module, earlier[id(module)] if id(module) in earlier else _empty_copy(module)) for module in modules
        ]
        copies = {id(original): copy for original, copy in self._pairs}
        for original, copy in self._pairs:
            copy._modules.clear()
            copy._modules.update({name: copies.get(id(child), child) for name, child in original._modules.items()})
        self.module = copies.get(id(self._layer), self._layer)

    def _copied(self, modules: list[nn.Module]) -> list[nn.Module]:
        """The modules to copy: shared ones, all modules inside of them, and all modules that contain them.

        A module inside of a shared one is copied also if the user has put it there after the pipe was made. A scripted
        module is never copied.
        """
        modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        roots = [module for module in modules if identity(module) in self._shared]
        inside = {id(module) for root in roots for module in root.modules()}
        return [module for module in modules if any(id(each) in inside for each in module.modules())]


def _changed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in now.items() if name not in before or before[name] is not value}


def _empty_copy(module: nn.Module) -> nn.Module:
    kind = type(module)  # `module.__class__` of a unit of a model is the class that it replaces
    copy = kind.__new__(kind)
    copy.__dict__.update(_modules={}, _buffers={}, _parameters={})
    for name in getattr(kind, "__slots__", ()):  # the name of a unit
        if hasattr(module, name):
            object.__setattr__(copy, name, getattr(module, name))
    return copy


def identity(module: nn.Module) -> int:
    """Tells modules apart by what they hold: a module and its twin in a part of a model have one dictionary.

    Copies of both have the parameters' dictionary in common.
    """
    own = vars(module)
    return id(own.get("_parameters", own))


def shared_modules(stages: Sequence[Iterable[nn.Module]]) -> set[int]:
    """The identities of all modules that are reached from more than one stage."""
    reached: Counter[int] = Counter()
    for layers in stages:
        every = {module for layer in layers for module in layer.modules()}
        # A scripted module cannot be copied. One with buffers is refused in two stages, see `refuse_shared_statistics`;
        # one with parameters that are trained is refused everywhere. So stages can run the same object.
        reached.update({identity(module) for module in every if not isinstance(module, torch.jit.ScriptModule)})
    return {identity for identity, count in reached.items() if count > 1}


def refuse_shared_statistics(stages: Sequence[nn.Sequential]) -> None:
    """Raises a ValueError if two stages would update the statistics of one norm, in no fixed order."""
    found: dict[int, tuple[nn.Module, list[list[str]]]] = {}
    for layers in stages:
        here: dict[int, list[str]] = {}
        for name, layer in layers.named_children():
            for path, module in layer.named_modules(prefix=name):
                if _has_statistics(module):
                    here.setdefault(identity(module), []).append(path)
                    found.setdefault(identity(module), (module, []))
        for each, paths in here.items():
            found[each][1].append(paths)
    for norm, places in found.values():
        if len(places) > 1:
            names = " and ".join(repr(paths[0]) for paths in places)
            raise ValueError(
                f"one {type(norm).__name__} is used in {len(places)} partitions, as {names}, which would update its "
                "running statistics at the same time; put them into one partition by another balance, use "
                "a norm for each, or track_running_stats=False"
            )


def _has_statistics(module: nn.Module) -> bool:
    """Whether a forward may change buffers of the module: those of a scripted one may be statistics, too."""
    if isinstance(module, torch.jit.ScriptModule):
        return next(module.buffers(), None) is not None
    return isinstance(module, torch_private.StatisticsNorm) and bool(module.track_running_stats)


def execution_layers(layers: Sequence[nn.Module], shared: set[int]) -> tuple[list[nn.Module], list[View]]:
    """The layers as a stage runs them, and the views among them."""
    views: dict[int, View] = {}
    runnable = []
    for layer in layers:
        if any(identity(module) in shared for module in layer.modules()):
            view = views.setdefault(id(layer), View(layer, shared))
            runnable.append(view.module)
        else:
            runnable.append(layer)
    return runnable, list(views.values())
