"""Calls of operators for which `operators` has no formula: they run in a detached graph that is differentiated twice.

    stage       x ----------------------- node ------------------- y        I goes through the node
                                            |
    detached    x' (a leaf) -- operator --> y'                              I computes the gradient of x',
                w' (a leaf) ----^                                           W that of w', from the same gradient of y'

The detached graph lives until W. Its formulas are autograd's own, so the result is exact to the last bit. It costs one
run of the engine more in I and one in W.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from pipework import torch_private
from pipework.autograd.weight_split.operation import DeferrableAlias, Operation, Parts, computed_with
from pipework.autograd.weight_split.operators import Linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class _DetachedGraph(Operation):
    """One call of any function of tensors that returns one tensor."""

    deciding = None  # all

    def __init__(
        self,
        function: Any,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        parameters: tuple[DeferrableAlias, ...],
    ) -> None:
        self._function, self._arguments, self._options, self.parameters = function, arguments, options, parameters
        self.name = getattr(function, "__name__", "an operator")
        # Autocast casts what einsum makes of its operands, nothing of an embedding, and the arguments of all others.
        self._casts = function not in (torch.einsum, F.embedding)
        self._leaves: dict[int, Tensor] = {}  # in place of the parameters
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}  # in the stage's graph, and in the detached one

    def wait_in(self, queue: list[tuple[Any, Tensor, Tensor]]) -> None:
        super().wait_in(queue)
        if self._unpack is not None:  # the hooks have what the graph needs of its leaves
            for leaf in self._inner:
                if type(leaf) is Tensor:
                    leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        del self._arguments, self._options

    def run_whole(self) -> Tensor:
        return self._function(*self._arguments, **self._options)  # type: ignore[no-any-return]

    def run(self) -> Tensor:
        arguments, options = self._inside(self._arguments), self._inside(self._options)
        output: Tensor = self._function(*arguments, **options)
        self._edge = get_gradient_edge(output)
        outside = [x for x, _ in self._inputs.values() if x.requires_grad]
        self._inner = tuple([inner for x, inner in self._inputs.values() if x.requires_grad])
        # The memory meter counts the first input as stored.
        self.kept = next((inner for _, inner in self._inputs.values()), self.parameters[0].plain)
        self._inputs.clear()
        return _Bridge.apply(self, output.detach(), *outside)  # type: ignore[no-any-return,no-untyped-call]

    def _inside(self, value: Any) -> Any:
        """The arguments with leaves of the detached graph in place of tensors."""
        if isinstance(value, tuple | list):
            return type(value)(map(self._inside, value))
        if isinstance(value, dict):
            return {key: self._inside(each) for key, each in value.items()}
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DeferrableAlias):
            if id(value) not in self._leaves:
                plain = computed_with(value)[0] if self._casts else value.plain
                self._leaves[id(value)] = plain.detach().requires_grad_()
            return self._leaves[id(value)]
        if id(value) not in self._inputs:
            tensor = computed_with(value)[0] if self._casts else value
            self._inputs[id(value)] = tensor, tensor.detach().requires_grad_(tensor.requires_grad)
        return self._inputs[id(value)][1]

    def input_gradients(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """I: the gradients of the inputs that require one."""
        return torch_private.gradients(self._edge, gradient, self._inner)

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        leaves = tuple(self._leaves.values())
        parts = dict(zip(self._leaves, torch_private.gradients(self._edge, gradient, leaves), strict=True))
        return [(alias, part) for alias in self.parameters if (part := parts.get(id(alias))) is not None]


class _Bridge(torch.autograd.Function):
    """The node in the stage's graph."""

    @staticmethod
    def forward(ctx: Any, call: _DetachedGraph, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.call = call
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return None, None, *ctx.call.input_gradients(gradient)


def tensors_among(value: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, which are nested in nothing but tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_among(each)


def with_detached_graph(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Operation | None:
    """An operation for a call without a formula, or None if its gradients are not to be deferred."""
    # Two runs of the engine call the hook that unpacks twice.
    hooks = torch_private.saved_tensor_hooks()
    once = hooks is not None and not getattr(hooks[1], "may_be_called_twice", False)
    if "out" in options or once or (function is F.embedding and not _is_plain_embedding(*arguments, **options)):
        return None
    found = dict.fromkeys(tensors_among((arguments, *options.values())))
    parameters = tuple([tensor for tensor in found if isinstance(tensor, DeferrableAlias)])
    # For a bias alone it does not pay.
    if not any(alias.dim() > 1 for alias in parameters):
        return None
    return _DetachedGraph(function, arguments, options, parameters)


def _is_plain_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> bool:
    """Whether an embedding leaves its weight as it is, and has a dense gradient."""
    return max_norm is None and not sparse


def _declined(*arguments: Any, **options: Any) -> None:
    return None


_MATMUL = (torch.matmul, torch.mm, torch.addmm, torch.einsum, torch.bmm, torch.baddbmm)
_METHODS = (Tensor.matmul, Tensor.mm, Tensor.__matmul__, Tensor.addmm, Tensor.bmm, Tensor.baddbmm)
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
OPERATORS: Final[Mapping[Any, Callable[..., Operation | None]]] = MappingProxyType(
    {**dict.fromkeys((*_MATMUL, *_METHODS, *_CONVOLUTIONS, F.embedding), _declined), F.linear: Linear.of}
)
"""PyTorch's function to what makes an operation of its arguments, or None if `with_detached_graph` decides."""
