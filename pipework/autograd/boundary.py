"""Cuts the autograd graph between stages: the sender makes a leaf of a value, and the receiver reads an alias of it.

    sender                                 receiver
    ... -> y                               leaf (its gradient is what goes back) -> alias -> first layer ...
           |                                ^
           +-- y.detach().requires_grad_() -+   the same memory, no graph

A leaf refuses in-place operations, an alias does not. Which layer comes first in a stage depends on the balance, and an
in-place layer (nn.ReLU(inplace=True)) must behave as in the un-partitioned model: it works where PyTorch allows it, and
raises PyTorch's own error where the sender saved the tensor for its backward. Autocast, too, treats a leaf in another
way: it casts it once, and sums the gradients of all its uses in the lower precision.

Strides decide in which order kernels add. So neither a value nor its gradient gets others on its way from stage to
stage than it has in the un-partitioned model.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge, increment_version

from pipework import torch_private
from pipework.values.dtensor import is_dtensor
from pipework.values.tensor_form import extent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    Root: TypeAlias = Tensor | GradientEdge | None  # where a backward starts; None: the output needs none


def cut(tensor: Tensor) -> Tensor:
    """The tensor without its graph: a leaf that requires a gradient exactly if the tensor did.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> leaf = cut(weight * 2)
        >>> leaf.is_leaf, leaf.requires_grad, cut(torch.ones(2)).requires_grad
        (True, True, False)
    """
    leaf = tensor.detach()
    if (source := getattr(tensor, "pipework_source", None)) is not None:
        leaf.pipework_source = source  # type: ignore[attr-defined]
    return leaf.requires_grad_() if tensor.requires_grad else leaf


def note_source(output: Tensor, leaves: Mapping[int, Tensor]) -> None:
    """Notes at an output, and at the leaf that is made of it, of which input it has the memory.

    A later stage that overwrites it reports that to the sender of the input, too.

    Args:
        output: of a stage.
        leaves: the inputs of the stage by the ids of their aliases.
    """
    base = torch_private.viewed(output)
    source = leaves.get(id(output if base is None else base))
    if source is not None:
        output.pipework_source = source  # type: ignore[attr-defined]


def enter(leaf: Tensor) -> Tensor:
    """An alias of the leaf for the stage's first layer, which may change it in place.

    A tensor that requires no gradient is returned as it is, and so is one that is not strided (sparse, nested).
    """
    if not leaf.requires_grad or leaf.layout is not torch.strided:
        return leaf
    # A view has usual strides along dimensions of size 1, and its gradient too. DTensors have no views.
    if 1 in leaf.shape or (type(leaf) is not Tensor and is_dtensor(leaf)):
        return _alias(leaf)
    return torch_private.unsafe_view(leaf, leaf.shape)


def view(leaf: Tensor) -> Tensor:
    """A view of the leaf, which PyTorch refuses to change in place, as it does the leaf.

    Example:
        >>> viewed = view(torch.ones(2, requires_grad=True))
        >>> viewed.is_leaf, viewed._is_view()
        (False, True)
    """
    return leaf[...] if leaf.requires_grad and leaf.layout is torch.strided else leaf


def edge(output: Tensor) -> Root:
    """The output's edge into the graph, from which a backward can start without keeping the output's memory alive."""
    node = output.grad_fn
    if node is None:
        return output if output.requires_grad else None
    if node.__class__.__base__ is BackwardCFunction:  # of a function in Python, which an edge alone does not keep alive
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


def mark_unchangeable(leaf: Tensor) -> None:
    """Marks a view of a leaf of the caller, or of a parameter, whose values no layer may change."""
    leaf.pipework_unchangeable = True  # type: ignore[attr-defined]


def is_unchangeable(leaf: Tensor) -> bool:
    """Whether a leaf has that mark. It gets no alias, so that PyTorch refuses an in-place operation on it."""
    return getattr(leaf, "pipework_unchangeable", False)


def report_overwriting(leaf: Tensor, alias: Tensor) -> bool:
    """After the stage has run: whether it changed its input in place; if so, increments the leaf's version.

    The alias has a version counter of its own. The sender shares the leaf's, and may have saved the tensor.
    """
    if alias is leaf or torch_private.viewed(alias) is not None or not torch_private.version(alias):
        return False
    overwritten: Tensor | None = leaf
    while overwritten is not None:
        increment_version(overwritten)
        overwritten = getattr(overwritten, "pipework_source", None)
    return True


def renewed(leaf: Tensor) -> Tensor:
    """Another leaf with the same memory and version counter, for a further pass: it has no hooks of an earlier one.

    Example:
        >>> leaf = torch.ones(2, requires_grad=True)
        >>> _ = leaf.register_hook(lambda gradient: 2 * gradient)
        >>> again = renewed(leaf)
        >>> again.sum().backward()
        >>> again.grad
        tensor([1., 1.])
    """
    return marked_like(leaf, cut(leaf))


def private_copy(leaf: Tensor) -> Tensor:
    """A leaf with memory of its own and the same strides, also if elements share memory or have gaps between them.

    Example:
        >>> private_copy(torch.zeros(2, 6)[:, ::2]).stride(), private_copy(torch.zeros(1).expand(3)).stride()
        ((6, 2), (0,))
    """
    return marked_like(leaf, _copied(leaf).requires_grad_(leaf.requires_grad))


def marked_like(leaf: Tensor, other: Tensor) -> Tensor:
    """The other leaf, with the mark of the first one if that has it."""
    if is_unchangeable(leaf):
        mark_unchangeable(other)
    return other


def _copied(leaf: Tensor) -> Tensor:
    plain = leaf.detach()
    if is_dtensor(leaf) or leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg() or not leaf.numel():
        return plain.clone()
    # Kernels also add in another order if the first element is aligned in another way.
    shift = leaf.data_ptr() % torch_private.ALIGNMENT // leaf.element_size()
    size = extent(leaf.shape, leaf.stride())
    memory = plain.new_empty(shift + size)
    memory[shift:] = plain.as_strided((size,), (1,))
    return memory.as_strided(leaf.shape, leaf.stride(), shift).data


def gradients(
    leaves: Sequence[Tensor], differentiate: Callable[..., None], *arguments: object
) -> tuple[Tensor | None, ...]:
    """The gradients that a backward gives to leaves, with the strides that they would have without a cut.

    A leaf's node, AccumulateGrad, copies a gradient whose strides are not the leaf's. A hook of the leaf sees the
    gradient before, and adds a hook to the node if that is going to happen. Only the second one takes the gradient, for
    the first one is also called when a layer differentiates something for itself during the backward.

    Args:
        leaves: whose `.grad` is None, before and afterwards.
        differentiate: runs autograd.
        arguments: for this function.

    Example:
        >>> leaf = torch.ones(2, 3, requires_grad=True)
        >>> (gradient,) = gradients([leaf], leaf.sum().backward)
        >>> gradient.stride(), leaf.grad
        ((0, 0), None)
    """
    takers: dict[int, _Taker] = {}
    # A detached input is no leaf any more if a layer has added something to it, in place, that requires a gradient.
    differentiable = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
    handles = []
    for leaf in differentiable:
        handles.append(leaf.register_hook(functools.partial(_see, takers, leaf)))  # type: ignore[no-untyped-call]
    try:
        differentiate(*arguments)
    finally:
        for handle in handles:
            handle.remove()
    found = tuple([leaf.grad if leaf.is_leaf else None for leaf in leaves])
    for leaf in differentiable:
        leaf.grad = None
    if takers:
        taken = {key: taker.end() for key, taker in takers.items()}
        found = tuple([taken.get(id(leaf), gradient) for leaf, gradient in zip(leaves, found, strict=True)])
    return found


def _see(takers: dict[int, _Taker], leaf: Tensor, gradient: Tensor) -> None:
    """The hook of the leaf."""
    if gradient.layout is not torch.strided or id(leaf) in takers:  # a sparse one has no strides
        return
    if not (gradient.is_contiguous() and gradient.stride() == leaf.stride()):
        takers[id(leaf)] = _Taker(leaf)


class _Taker:
    """A hook of the leaf's node that takes the gradient away from it."""

    def __init__(self, leaf: Tensor) -> None:
        self._taken: Tensor | None = None
        self._handle = get_gradient_edge(leaf).node.register_prehook(self)

    def __call__(self, gradients: tuple[Tensor, ...]) -> tuple[None]:
        (self._taken,) = gradients
        return (None,)

    def end(self) -> Tensor | None:
        """After the backward."""
        self._handle.remove()
        return self._taken


class _Alias(torch.autograd.Function):
    """The same memory and strides, with a version counter of its own."""

    @staticmethod
    def forward(ctx: object, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


_alias: Callable[[Tensor], Tensor] = _Alias.apply
