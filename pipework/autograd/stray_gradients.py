"""Gradients that reach a stage outside of the pipe's own backward: they would be lost, so they are refused.

A layer may keep a tensor with its graph (`self.aux = ...`). The graph ends at the stage's aliases and at the leaves of
its input, not at the user's parameters. If the user's backward goes through it, a gradient arrives at these leaves
while no worker runs: nobody takes it, or it is mixed into another one.

A hook on each leaf would be called for each micro-batch, so only some mini-batches have hooks: the first ones and
a few later ones. A program that adds such a loss mostly does so in every mini-batch.

A layer with `self.cache = [other.weight]`, or a closure over a parameter, uses the user's parameter and not its alias.
Its worker would add to the user's `.grad`, once per micro-batch and on another thread. So the first graph of each stage
is searched for leaves that are neither its aliases nor its inputs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from torch import nn

    from pipework.autograd.aliases import Aliases
    from pipework.runtime.stage.stage import Stage


class StrayGradients:
    """Refuses gradients that reach the leaves of a stage in one mini-batch while its worker does not run.

    Args:
        stage: the stage.

    Attributes:
        running: whether the stage's worker runs: then gradients are its own.
    """

    def __init__(self, stage: Stage) -> None:
        # A tensor that a layer keeps refers to the leaves, and so to this object: no circle back to the layer.
        self._stage = weakref.ref(stage)
        self.running = False

    def __getstate__(self) -> dict[str, bool]:
        """A layer may pickle a parameter that it reads, and all that hangs on it; a copy refuses nothing."""
        return {"running": True}

    def new_queue(self) -> WatchedQueue:
        """For the gradients of parameters that have no edge to their aliases, since they are deferred to W."""
        return WatchedQueue(self)

    def watch(self, leaves: Iterable[Tensor], _: object = None) -> None:
        """Adds hooks to leaves, which change no gradient; called after a stage's forward."""

        def refuse(gradient: Tensor | None) -> None:
            if gradient is not None:
                self.refuse()

        refuse.__torch_unserializable__ = True  # type: ignore[attr-defined]  # no warning if a layer pickles the tensor
        with torch_private.without_torch_function():
            for leaf in leaves:
                if leaf.requires_grad:
                    leaf.register_hook(refuse)  # type: ignore[no-untyped-call]

    def refuse(self) -> None:
        """Raises a RuntimeError if the worker does not run."""
        if self.running:
            return
        stage = self._stage()
        kept = None if stage is None else _kept_graph(stage)
        raise RuntimeError(
            f"a gradient reached {'a stage' if stage is None else stage.place} outside of the pipe's own backward, "
            "where it would be lost: the loss was computed from a tensor kept from a forward with its graph"
            f"{f' ({kept})' if kept else ''}, and that belongs to one micro-batch alone. Let the layer return that "
            "tensor with its output and the layers after it pass it on, and add it to the loss "
            "there (see 'A loss of a layer's own' in the documentation of values); to look at it, keep it with "
            ".detach()"
        )


class WatchedQueue(list["tuple[Any, Tensor, Tensor]"]):
    """A queue of the weight-gradient store for a mini-batch in which gradients from outside are refused.

    Args:
        stray: of the stage.
    """

    def __init__(self, stray: StrayGradients) -> None:
        super().__init__()
        self._stray = stray

    def append(self, waiting: tuple[Any, Tensor, Tensor]) -> None:
        """Raises a RuntimeError if the worker does not run."""
        self._stray.refuse()
        super().append(waiting)


def explain_freed_graph(error: RuntimeError, stage: Stage) -> str | None:
    """What to do about PyTorch's error for a graph that was freed before; None: it is another error.

    Args:
        error: raised by a backward of the stage.
        stage: the stage.
    """
    if "backward through the graph a second time" not in str(error):
        return None
    kept = _kept_graph(stage)
    return (
        f"a tensor of {stage.place} was kept with its graph from another micro-batch or step"
        f"{f' ({kept})' if kept else ', by a layer or a cache such as parametrize.cached()'}, and each micro-batch has "
        "a backward of its own, which frees it. Compute the tensor in each forward, or keep it with .detach(); "
        "retain_graph=True does not help (see 'A loss of a layer's own' in the documentation of values, "
        "docs/values.md)"
    )


def _kept_graph(stage: Stage) -> str | None:
    """The attribute of a layer that holds a tensor with its graph, as messages call it; None: there is not just one."""
    kept = [text for layer in stage.layers for text in _kept_graphs(layer.module, layer.name)]
    return kept[0] if len(kept) == 1 else None


def _kept_graphs(layer: nn.Module, name: str) -> Iterable[str]:
    """Those of a layer and the modules in it; without what is made of a parameter in each forward (`weight_norm`)."""
    for path, module in layer.named_modules():
        for attribute, value in vars(module).items():
            if not isinstance(value, Tensor) or value.grad_fn is None:
                continue
            if not any(f"{attribute}{ending}" in module._parameters for ending in ("_g", "_v", "_orig")):
                within = f"its {path!r}" if path else "it"
                yield f"layer {name!r} ({type(layer).__name__}) has one: {within} keeps {attribute!r}"


def refuse_hidden_parameters(
    stage: Stage, aliases: Aliases, leaves: Iterable[Tensor], outputs: Iterable[Tensor]
) -> None:
    """Raises a RuntimeError if the graph of `outputs` has a leaf that is neither an alias nor an input of the stage."""
    given = list(leaves)
    known = {id(leaf) for leaf in (*aliases.leaves, *given)}
    # Some forwards ask for the gradient of a view of their input, and nobody reads it.
    memory = {torch_private.memory_key(leaf) for leaf in given} - {None}
    for variable in graph_leaves(outputs):
        is_view_of_input = torch_private.memory_key(variable) in memory
        if id(variable) not in known and not is_view_of_input:
            raise RuntimeError(
                f"{stage.place} uses {_name(variable, stage)} without reading it from its module, for example from a "
                "list, a closure, an attribute that is not a registered parameter, or a function or object that an "
                "earlier layer returned. Let the layer read it as an "
                "attribute of the module that owns it (self.weight), or register it there with register_parameter. If "
                "its forward makes it, it must not call requires_grad_() on it, since nobody reads that gradient."
            )


def graph_leaves(outputs: Iterable[Tensor]) -> Iterable[Tensor]:
    """All tensors that a backward from `outputs` would accumulate into."""
    stack: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _name(variable: Tensor, stage: Stage) -> str:
    """Names a parameter whose module holds an alias now: both have the same memory."""
    for layer in stage.layers:
        for name, alias in layer.module.named_parameters():
            if alias.data_ptr() == variable.data_ptr() and alias.shape == variable.shape:
                return f"parameter '{layer.name}.{name}' of layer {layer.name!r}"
    return f"a tensor of shape {tuple(variable.shape)} that requires a gradient and is no parameter of these layers"
