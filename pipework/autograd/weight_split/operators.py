"""The operators that can defer the gradients of their parameters, each with autograd's own formula.

The tests compare each with autograd, to the last bit and for every dtype. For arguments with which a formula would give
other bits, the operator runs in a detached graph (see `detached_graph`), or as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any, Final, Self, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from pipework import torch_private
from pipework.autograd.weight_split.operation import DeferrableAlias, Operation, OperationWithBias, Parts, Queue


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

    @classmethod
    def of_matrix(cls, input: Tensor, weight: DeferrableAlias, bias: DeferrableAlias, queue: Queue) -> Self | None:
        """The operation on a matrix, as `of`, `run` and `wait_in(queue)` make it together; None: it needs these."""
        if (
            input.dim() != 2
            or type(input) is not Tensor
            or input.is_inference()
            or not weight.is_factor
            or bias.sizes != weight.sizes[:1]
            or torch_private.any_autocast()
            or torch_private.saved_tensor_hooks() is not None
        ):
            return None
        self = cls.__new__(cls)
        self._weight, self._bias, self.parameters = weight, bias, (weight, bias)
        self._at_once, self._shape, self._unpack = True, None, None
        self._queue = queue
        self.kept = kept = input.detach() if input.requires_grad else input
        self._version = torch_private.version(kept)
        return self

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


class _MatrixProduct(OperationWithBias):
    """x @ w, and b + x @ w: torch.matmul, torch.mm, torch.addmm."""

    __slots__ = ()
    name = "a matrix product"

    @classmethod
    def of(cls, *factors: Any, **options: Any) -> Operation | None:
        if options or len(factors) != 2 or not _is_factor(factors[1]):
            return None
        first, second = factors
        return None if isinstance(first, DeferrableAlias) or first.dim() < 2 else cls(first, second)

    @classmethod
    def with_bias(cls, *terms: Any, **options: Any) -> Operation | None:
        if options or len(terms) != 3 or not _is_factor(terms[2]):
            return None
        bias, first, second = terms
        if isinstance(first, DeferrableAlias) or not _is_bias(bias, second.sizes[1]):
            return None
        return cls(first, second, bias)

    def run(self) -> Tensor:
        kept, weight, bias = self.computed()
        return _times(kept, weight) if bias is None else torch.addmm(bias, kept, weight)

    def run_whole(self) -> Tensor:
        if self._bias is None:
            return torch.matmul(self.kept, self._weight)
        return torch.addmm(self._bias, self.kept, self._weight)

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        gradient = _rows(gradient)
        kept = _rows(kept, gradient.dtype)
        # A matrix of one column has the strides of its transpose, and autograd takes it for that.
        by_columns = self._weight.sizes[1] == 1
        of_weight = self._weight, gradient.t().mm(kept).t() if by_columns else kept.t().mm(gradient)
        return (of_weight, (self.parameters[1], gradient.sum(0))) if self.bias_is_deferred else (of_weight,)


class _Convolution(OperationWithBias):
    """F.conv1d, F.conv2d, F.conv3d and their transposed counterparts."""

    __slots__ = ("_function", "_geometry")
    name = "a convolution"

    def __init__(
        self,
        function: Callable[..., Tensor],
        kept: Tensor,
        weight: DeferrableAlias,
        bias: Tensor | None,
        geometry: tuple[Any, ...],
    ) -> None:
        super().__init__(kept, weight, bias)
        self._function, self._geometry = function, geometry

    def run(self) -> Tensor:
        return self._call(*self.computed())

    def run_whole(self) -> Tensor:
        return self._call(self.kept, self._weight, self._bias)

    def _call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        stride, padding, dilation, transposed, output_padding, groups = self._geometry
        rest = (
            (stride, padding, output_padding, groups, dilation) if transposed else (stride, padding, dilation, groups)
        )
        return self._function(x, weight, bias, *rest)

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        weight, kept = self._weight, kept.to(gradient.dtype)
        _, *parts = torch.ops.aten.convolution_backward(
            gradient,
            kept,
            weight.casts.get(kept.dtype, weight.plain),
            list(self._bias.shape) if self._bias is not None else None,
            *self._geometry,
            [False, True, self.bias_is_deferred],
        )
        return tuple(zip(self.parameters, parts, strict=False))


def _convolution(function: Callable[..., Tensor], dimensions: int, *, transposed: bool) -> Callable[..., Any]:
    def spelt_out(number: Any) -> list[int]:
        return [number] * dimensions if isinstance(number, int) else list(number) * (dimensions // len(number))

    def of(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        *rest: Any,
        **options: Any,
    ) -> Operation | None:
        if (
            not isinstance(weight, DeferrableAlias)
            or isinstance(input, DeferrableAlias)
            or input.dim() != dimensions + 2
        ):
            return None
        if isinstance(padding, str):
            return None
        names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
        known = {"output_padding": 0, "groups": 1, "dilation": 1, **dict(zip(names, rest, strict=False)), **options}
        geometry = (
            spelt_out(stride),
            spelt_out(padding),
            spelt_out(known["dilation"]),
            transposed,
            spelt_out(known["output_padding"]),
            known["groups"],
        )
        return _Convolution(function, input, weight, bias, geometry)

    return of


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


linear_of_matrix: Final = _Linear.of_matrix
"""The usual case of the most usual operator: F.linear of a matrix, with weight and bias, in half of the time."""

EXPLICIT: Final[Mapping[Any, Callable[..., Operation | None]]] = MappingProxyType(
    {
        F.linear: _Linear.of,
        torch.addmm: _MatrixProduct.with_bias,
        **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _MatrixProduct.of),
        F.conv1d: _convolution(F.conv1d, 1, transposed=False),
        F.conv2d: _convolution(F.conv2d, 2, transposed=False),
        F.conv3d: _convolution(F.conv3d, 3, transposed=False),
        F.conv_transpose1d: _convolution(F.conv_transpose1d, 1, transposed=True),
        F.conv_transpose2d: _convolution(F.conv_transpose2d, 2, transposed=True),
        F.conv_transpose3d: _convolution(F.conv_transpose3d, 3, transposed=True),
        F.embedding: _Embedding.of,
    }
)
"""PyTorch's function to what makes an operation of its arguments, or None if this call cannot be deferred."""


def _decomposed(function: Any) -> Any:
    """The function without its own `__torch_function__` call, so that each operator inside makes one."""
    names = {**function.__globals__, "has_torch_function": lambda arguments: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


DECOMPOSED: Final[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
    {F.multi_head_attention_forward: _decomposed(F.multi_head_attention_forward)}
)
"""Functions made of operators, each of which can be deferred."""
