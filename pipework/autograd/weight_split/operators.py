"""The operators that can defer the gradients of their parameters, each with autograd's own formula.

The tests compare each with autograd, to the last bit and for every dtype. For arguments with which a formula would give
other bits, the operator runs in a detached graph (see `detached_graph`), or as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from pipework import torch_private
from pipework.autograd.weight_split.operation import DeferrableAlias, Operation, OperationWithBias, Parts


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


class _Linear(OperationWithBias):
    """F.linear(x, w, b)."""

    __slots__ = ("_at_once", "_shape")
    name = "linear"

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operation | None:
        if not _is_factor(weight) or isinstance(input, DeferrableAlias) or input.dim() < 2:
            return None
        return cls(input, weight, bias) if _is_bias(bias, weight.sizes[0]) else None

    def run(self) -> Tensor:
        kept, weight, bias = self.computed()
        self._shape = None
        is_matrix = kept.dim() == 2
        # PyTorch adds the bias to the rows of a matrix, or after the product.
        self._at_once = is_matrix or (bias is not None and kept.is_contiguous())
        if self._at_once:
            if not is_matrix:  # the operator returns a view of what it computes
                self._shape = (*kept.shape[:-1], weight.shape[0])
                kept = _rows(kept)
            return F.linear(kept, weight, bias)
        output = _times(kept, weight.t())
        return output if bias is None else output.add_(bias)

    def shaped(self, output: Tensor) -> Tensor:
        return output if self._shape is None else output.view(self._shape)

    def run_whole(self) -> Tensor:
        return F.linear(self.kept, self._weight, self._bias)

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        rows = _rows(gradient)
        of_weight = self._weight, rows.t().mm(_rows(kept, rows.dtype))
        if not self.bias_is_deferred:
            return (of_weight,)
        bias = self.parameters[1]
        return of_weight, (bias, rows.sum(0) if self._at_once else gradient.sum_to_size(bias.sizes))


class _Embedding(Operation):
    """F.embedding(indices, w)."""

    __slots__ = ("_options", "_weight")
    name = "embedding"

    def __init__(
        self, kept: Tensor, weight: DeferrableAlias, padding_idx: int | None, scale_grad_by_freq: bool
    ) -> None:
        self.kept, self._weight = kept, weight
        self.parameters = (weight,)
        self._options = padding_idx, scale_grad_by_freq

    @classmethod
    def of(
        cls,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Operation | None:
        if not isinstance(weight, DeferrableAlias) or max_norm is not None or sparse:
            return None
        return cls(input, weight, padding_idx, scale_grad_by_freq)

    def run(self) -> Tensor:
        return self._call(self._weight.plain)

    def run_whole(self) -> Tensor:
        return self._call(self._weight)

    def _call(self, weight: Tensor) -> Tensor:
        padding_idx, scale_grad_by_freq = self._options
        return F.embedding(self.kept, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        padding_idx, scale_grad_by_freq = self._options
        count = self._weight.sizes[0]
        padding = -1 if padding_idx is None else padding_idx if padding_idx >= 0 else count + padding_idx
        part = torch.ops.aten.embedding_dense_backward(gradient, kept, count, padding, scale_grad_by_freq)
        return ((self._weight, part),)


EXPLICIT: Final[Mapping[Any, Callable[..., Operation | None]]] = MappingProxyType(
    {F.linear: _Linear.of, F.embedding: _Embedding.of}
)
"""PyTorch's function to what makes an operation of its arguments, or None if this call needs another way."""


def _decomposed(function: Any) -> Any:
    """The function without its own `__torch_function__` call, so that each operator inside makes one."""
    names = {**function.__globals__, "has_torch_function": lambda arguments: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


DECOMPOSED: Final[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
    {F.multi_head_attention_forward: _decomposed(F.multi_head_attention_forward)}
)
"""Functions made of operators, each of which can be deferred."""
