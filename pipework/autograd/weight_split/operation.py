"""One call of an operator whose parameters' gradients can be deferred, and the alias that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

_version, _is_grad_enabled = torch_private.version, torch.is_grad_enabled
_accumulates_all = torch_private.accumulates_all


class DeferrableAlias(torch_private.TracedAsParameter):
    """A parameter's alias whose gradient can be deferred; the part of it that operators read.

    Attributes:
        plain: the same memory, without a gradient.
        sizes: its shape; `Tensor.shape` of a subclass goes through `__torch_function__`.
        type_of_values: its dtype, likewise.
        is_factor: whether it is a contiguous matrix, for which autograd's formula of a product is known.
        casts: its copies in the dtypes of autocast, made once in a mini-batch.
        deferred: whether its gradient is deferred; None: not known yet.
        weight_store: the store that decides it.
    """

    plain: Tensor
    sizes: tuple[int, ...]
    type_of_values: torch.dtype
    is_factor: bool
    casts: dict[torch.dtype, Tensor]
    deferred: bool | None
    weight_store: Any

    def filled(self, plain: Tensor, weight_store: Any, deferred: bool | None, *, is_factor: bool) -> Self:
        """Sets all attributes of a new alias. Returns the alias."""
        self.plain, self.sizes, self.type_of_values = plain, plain.shape, plain.dtype
        self.weight_store, self.deferred, self.casts, self.is_factor = weight_store, deferred, {}, is_factor
        return self


Queue: TypeAlias = list[tuple[Any, Tensor, Tensor]]  # an operation, its stored input, the gradient of its output
Parts: TypeAlias = Sequence[tuple[DeferrableAlias, Tensor]]


class Operation:
    """One call of an operator: it is the hook on the output, and W computes the parameters' gradients from it.

    Attributes:
        name: of the operator, for messages.
        parameters: the aliases whose gradients it can defer.
        deciding: so many of them, from the first, are deferred together or not at all. 1: of a linear layer the weight
            decides, and its bias may be left to autograd. None: all.
        kept: what the gradients need beside the output's gradient; after `wait_in`, what the user's hooks for saved
            tensors made of it.
    """

    __slots__ = ("_gradient_version", "_queue", "_unpack", "_version", "kept", "parameters")
    name: str
    deciding: int | None = 1
    parameters: tuple[DeferrableAlias, ...]
    kept: Tensor

    def run(self) -> Tensor:
        """Returns the output, without a graph to the parameters, and sets `kept` to what it was computed with.

        The output is not a view: an in-place operation on a view would replace its node and so drop the hook.
        """
        raise NotImplementedError

    def shaped(self, output: Tensor) -> Tensor:
        """What the operator returns, made from what `run` returned."""
        return output

    def run_whole(self) -> Tensor:
        """Returns the output with a graph to the parameters, as without a store."""
        raise NotImplementedError

    def leave_out(self, alias: DeferrableAlias) -> bool:
        """Leaves one parameter to autograd. False: then the gradient of none can be deferred."""
        return False

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        """The parts of the parameters' gradients, from `kept` and the output's gradient."""
        raise NotImplementedError

    def wait_in(self, queue: Queue) -> None:
        """After `run`: the hook will append the operation to this queue, with the output's gradient."""
        self._queue = queue
        self._unpack: Callable[[Any], Tensor] | None = None
        kept = self.kept
        if kept.requires_grad:  # its graph would keep the stage's input and its gradient alive until W
            kept = self.kept = kept.detach()
        hooks = torch_private.saved_tensor_hooks()
        if hooks is None:
            self._version = -1 if kept.is_inference() else _version(kept)
        else:  # the user's, which may move what is kept, or the memory meter's
            self.kept, self._unpack = hooks[0](kept), hooks[1]

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """The hook: autograd calls it with the gradient of the output."""
        gradient, kept = gradients[0], self.kept
        if gradient is None:
            return
        if not _accumulates_all() and self.parameters[0].weight_store.accumulates:
            return  # a layer differentiates something for itself, in the middle of I: torch.autograd.grad
        if _is_grad_enabled():
            raise RuntimeError(
                f"a layer differentiates a gradient (create_graph=True) that goes through {self.name}, which it did "
                "not do for the first micro-batch; use a schedule without I and W, such as '1f1b'"
            )
        if self._unpack is not None:
            kept = self._unpack(kept)
        elif self._version >= 0 and (version := _version(kept)) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input of {self.name}, of shape {tuple(kept.shape)}, is at version {version}; expected version "
                f"{self._version} instead"
            )
        self._gradient_version = _version(gradient)
        self._queue.append((self, kept, gradient))

    def refuse_overwritten(self, gradient: Tensor) -> None:
        """Raises a RuntimeError if the gradient of the output was changed between I and W."""
        if _version(gradient) != self._gradient_version:
            raise RuntimeError(
                f"the gradient of an output of {self.name}, of shape {tuple(gradient.shape)}, has been modified by an "
                "inplace operation while it waited for W: a backward of a layer, or a hook, changes the gradient that "
                "it is given. Let it return a new tensor, or use a schedule without I and W, such as '1f1b'"
            )


def computed_with(*tensors: Any) -> list[Any]:
    """What an operator reads in place of tensors: the memory of an alias, and under autocast a copy in its dtype.

    A parameter is copied once in a mini-batch.
    """
    if torch_private.any_autocast():
        return list(map(_cast, tensors))
    return [tensor.plain if isinstance(tensor, DeferrableAlias) else tensor for tensor in tensors]


def _cast(tensor: Any) -> Any:
    is_parameter = isinstance(tensor, DeferrableAlias)
    plain = tensor.plain if is_parameter else tensor
    if plain is None or not torch.is_autocast_enabled(plain.device.type):
        return plain
    if not plain.is_floating_point() or plain.dtype == torch.float64:
        return plain
    dtype = torch.get_autocast_dtype(plain.device.type)
    if not is_parameter:
        # PyTorch casts a leaf once for all its uses, and sums their gradients in the lower precision.
        return plain if plain.requires_grad and plain.is_leaf else plain.to(dtype)
    if dtype not in tensor.casts:
        tensor.casts[dtype] = plain.to(dtype)
    return tensor.casts[dtype]
