"""The few things that PyTorch's autograd engine only tells or does through private names, in one place.

Each has a public counterpart that is too slow or missing; the comment says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.autograd.graph import GradientEdge


_run = torch.autograd.Variable._execution_engine.run_backward


def run_backward(outputs: tuple[Tensor | GradientEdge, ...], gradients: tuple[Tensor, ...], retain_graph: bool) -> None:
    """Accumulates the gradients of `outputs` into the leaves of their graph.

    `torch.autograd.backward` does the same after 20 microseconds of checks that the boundary has made already.
    """
    # No graph of the gradients, no choice of inputs, unreachable leaves are allowed, gradients are accumulated.
    _run(outputs, gradients, retain_graph, False, (), True, True)


def retains_graph() -> bool:
    """Inside a node's backward: whether the caller asked for `retain_graph=True`. There is no public way to ask."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The calling thread's innermost `saved_tensors_hooks`. There is no public way to ask."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else (hooks[0], hooks[1])


def hook_gradient(output: Tensor, hook: Callable[[tuple[Tensor | None, ...]], None]) -> None:
    """Calls `hook` with the gradients that the node of `output` gets, after all hooks of the tensor itself.

    `Tensor.register_hook` would be called before hooks that the user registers later, which may change the gradient.
    """
    output.grad_fn.register_prehook(hook)  # type: ignore[union-attr]


def gradients(output: GradientEdge, gradient: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`; the graph stays. As `torch.autograd.grad`, which checks more."""
    return _run((output,), (gradient,), True, False, inputs, True, False)


def in_transform() -> bool:
    """Whether a `torch.func` transform is running. There is no public way to ask."""
    return torch._C._are_functorch_transforms_active()
