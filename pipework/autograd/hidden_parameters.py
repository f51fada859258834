"""Finds parameters that a layer uses without reading them from their module.

A layer with `self.cache = [other.weight]`, or a closure over a parameter, uses the user's parameter and not its alias.
Its worker would add to the user's `.grad`, once per micro-batch and on another thread. So the first graph of each stage
is searched for leaves that are neither its aliases nor its inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from pipework.autograd.aliases import Aliases
    from pipework.runtime.stage.stage import Stage


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
