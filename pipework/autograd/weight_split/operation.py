"""One call of an operator whose parameters' gradients can be put off, and what such operators know of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable


class Postponing(torch_private.TracedAsParameter):
    """A parameter's alias whose gradient can be put off; the part of it that operators know.

    Attributes:
        plain: the same memory, without a gradient.
        sizes: its shape. PyTorch asks the class before it tells the shape itself.
        type_of_values: its dtype, likewise.
        is_factor: whether it lies as a matrix does of which autograd decides how it multiplies.
        casts: what autocast has made of it in this mini-batch, by type.
        waits: whether its gradient is put off; None: not known yet.
        weight_store: who decides that.
    """

    plain: Tensor
    sizes: tuple[int, ...]
    type_of_values: torch.dtype
    is_factor: bool
    casts: dict[torch.dtype, Tensor]
    waits: bool | None
    weight_store: Any


Parts: TypeAlias = Sequence[tuple[Postponing, Tensor]]


class Operation:
    """One call of an operator; later, what autograd calls with the gradient of its output, and what waits for W.

    Attributes:
        name: of the operator, for messages.
        parameters: the aliases whose gradients it can put off.
        deciding: how many of them, from the first, have to be put off if any is.
        kept: what the gradients need beside the output's gradient; once it waits, in the way that the user's hooks for
            saved tensors want it.
    """

    __slots__ = ("_queue", "_unpack", "_version", "kept", "parameters")
    name: str
    deciding: int | None = 1
    parameters: tuple[Postponing, ...]
    kept: Tensor

    def run(self) -> Tensor:
        """The output, without a graph to the parameters. Then `kept` is what was really computed with.

        It is no view: an in-place operation on that would take its place in the graph.
        """
        raise NotImplementedError

    def shaped(self, output: Tensor) -> Tensor:
        """What the operator returns, of what `run` returns."""
        return output

    def run_whole(self) -> Tensor:
        """The output as always."""
        raise NotImplementedError

    def leave_out(self, alias: Postponing) -> bool:
        """That parameter's gradient is not to be put off. False: then none can be."""
        return False

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        """Of what was kept and the output's gradient, the parts of the parameters' gradients."""
        raise NotImplementedError

    def wait_in(self, queue: list[tuple[Any, Tensor, Tensor]]) -> None:
        """It has run: as soon as the output's gradient is there, the operation is to stand in the queue with it."""
        self._queue = queue
        self._unpack: Callable[[Any], Tensor] | None = None
        hooks = torch_private.saved_tensor_hooks()
        kept = self.kept
        if kept.requires_grad:  # its graph would keep the stage's input, and the gradient of that, alive until W
            kept = self.kept = kept.detach()
        if hooks is None:
            self._version = -1 if kept.is_inference() else torch_private.version(kept)
        else:  # of a user who moves what is kept, or of somebody who counts it
            self.kept, self._unpack = hooks[0](kept), hooks[1]

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Autograd has the gradient of the output."""
        gradient, kept = gradients[0], self.kept
        if gradient is None:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"a layer differentiates a gradient (create_graph=True) that goes through {self.name}, which it did "
                "not do for the first micro-batch; use a schedule that does not split backwards"
            )
        if self._unpack is not None:
            kept = self._unpack(kept)
        elif self._version >= 0 and (version := torch_private.version(kept)) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input of {self.name}, of shape {tuple(kept.shape)}, is at version {version}; expected version "
                f"{self._version} instead"
            )
        self._queue.append((self, kept, gradient))


class OperationWithBias(Operation):
    """One that multiplies what it keeps by a weight, in some way, and adds a bias."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, kept: Tensor, weight: Postponing, bias: Tensor | None = None) -> None:
        self.kept, self._weight, self._bias = kept, weight, bias
        self.parameters = (weight, bias) if isinstance(bias, Postponing) else (weight,)

    def leave_out(self, alias: Postponing) -> bool:
        """See `Operation`."""
        if alias is self._weight or torch_private.any_autocast():
            return False
        self.parameters = (self._weight,)
        return True

    @property
    def bias_waits(self) -> bool:
        """Whether the bias is one of the parameters."""
        return len(self.parameters) == 2

    def computed(self) -> list[Any]:
        """What is kept, the weight and the bias, as they are computed with. `kept` is that from now on."""
        result = computed_with(self.kept, self._weight, self._bias)
        self.kept = result[0]
        if isinstance(self._bias, Postponing) and not self.bias_waits:
            result[2] = self._bias  # with a graph
        return result


def computed_with(*tensors: Any) -> list[Any]:
    """What an operator computes with in place of tensors: of an alias, its memory; under autocast, a lower precision.

    Of a parameter, autocast makes one copy in a mini-batch.
    """
    if torch_private.any_autocast():
        return list(map(_cast, tensors))
    return [tensor.plain if isinstance(tensor, Postponing) else tensor for tensor in tensors]


def _cast(tensor: Any) -> Any:
    is_parameter = isinstance(tensor, Postponing)
    plain = tensor.plain if is_parameter else tensor
    if plain is None or not torch.is_autocast_enabled(plain.device.type):
        return plain
    if not plain.is_floating_point() or plain.dtype == torch.float64:
        return plain
    dtype = torch.get_autocast_dtype(plain.device.type)
    if not is_parameter:
        # PyTorch casts a leaf once for all that use it, and sums their gradients in the lower precision.
        return plain if plain.requires_grad and plain.is_leaf else plain.to(dtype)
    if dtype not in tensor.casts:
        tensor.casts[dtype] = plain.to(dtype)
    return tensor.casts[dtype]
