"""The linear layer, which computes the gradients of its weight and bias by autograd's own formula.

A detached graph (see `detached_graph`) would cost the most frequent operator two runs of the engine more. The tests
compare with autograd, to the last bit and for every dtype. A call for which the formula would give other bits runs in a
detached graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from pipework import torch_private
from pipework.autograd.weight_split.operation import DeferrableAlias, Operation, Parts, computed_with


def _rows(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A matrix with all dimensions but the last made one."""
    rows = tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
    return rows if dtype is None or rows.dtype is dtype else rows.to(dtype)


def _is_factor(tensor: Any) -> TypeGuard[DeferrableAlias]:
    """Whether the value is a parameter that can be the second factor of a product."""
    return isinstance(tensor, DeferrableAlias) and tensor.is_factor


def _is_bias(tensor: Tensor | None, width: int) -> bool:
    """Whether the value is no parameter, or one with a number for each column."""
    return not isinstance(tensor, DeferrableAlias) or tensor.sizes == (width,)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """The product as PyTorch computes it with a matrix that requires a gradient: the input is made a matrix first."""
    product = _rows(rows).mm(matrix)
    return product if rows.dim() == 2 else torch_private.unsafe_view(product, (*rows.shape[:-1], matrix.shape[1]))


class Linear(Operation):
    """F.linear(x, w, b)."""

    __slots__ = ("_at_once", "_bias", "_shape", "_weight")
    name = "linear"

    def __init__(self, kept: Tensor, weight: DeferrableAlias, bias: Tensor | None = None) -> None:
        self.kept, self._weight, self._bias = kept, weight, bias
        self.parameters = (weight, bias) if isinstance(bias, DeferrableAlias) else (weight,)

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operation | None:
        """The operation for a call; None: `with_detached_graph` decides."""
        if not _is_factor(weight) or isinstance(input, DeferrableAlias) or input.dim() < 2:
            return None
        return cls(input, weight, bias) if _is_bias(bias, weight.sizes[0]) else None

    def leave_out(self, alias: DeferrableAlias) -> bool:
        """See `Operation`: the bias may be left to autograd."""
        if alias is self._weight or torch_private.any_autocast():
            return False
        self.parameters = (self._weight,)
        return True

    def run(self) -> Tensor:
        """See `Operation`."""
        kept, weight, bias = computed_with(self.kept, self._weight, self._bias)
        self.kept = kept
        if isinstance(self._bias, DeferrableAlias) and len(self.parameters) == 1:
            bias = self._bias  # with a graph
        self._shape = None
        is_matrix = kept.dim() == 2
        # PyTorch adds the bias to the rows of a matrix, or after the product.
        self._at_once = is_matrix or (bias is not None and kept.is_contiguous())
        if self._at_once:
            if not is_matrix:
                self._shape = (*kept.shape[:-1], weight.shape[0])
                kept = _rows(kept)
            return F.linear(kept, weight, bias)
        output = _times(kept, weight.t())
        return output if bias is None else output.add_(bias)

    def shaped(self, output: Tensor) -> Tensor:
        """See `Operation`."""
        if self._shape is None:
            return output
        return (Tensor.view if torch_private.LINEAR_IS_VIEW else torch_private.unsafe_view)(output, self._shape)

    def run_whole(self) -> Tensor:
        """See `Operation`."""
        return F.linear(self.kept, self._weight, self._bias)

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        """See `Operation`."""
        rows = _rows(gradient)
        of_weight = self._weight, rows.t().mm(_rows(kept, rows.dtype))
        if len(self.parameters) == 1:
            return (of_weight,)
        bias = self.parameters[1]
        return of_weight, (bias, rows.sum(0) if self._at_once else gradient.sum_to_size(bias.sizes))


def _decomposed(function: Any) -> Any:
    """The function without its own `__torch_function__` call, so that each operator inside makes one."""
    names = {**function.__globals__, "has_torch_function": lambda arguments: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


DECOMPOSED: Final[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
    {F.multi_head_attention_forward: _decomposed(F.multi_head_attention_forward)}
)
"""Functions made of operators, each of which can be deferred."""
