"""The loss inside of the pipe, which the last stage computes for each micro-batch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from pipework.runtime.failure import add_note
from pipework.runtime.stage.layer_errors import note_returned
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.runtime.stage.kept import Kept
    from pipework.runtime.stage.stage import Stage
    from pipework.runtime.transport import Message, Receive
    from pipework.values.nested import Structure

# Larger outputs are not copied: a loss over so many numbers is mostly one over words.
MOST_BYTES: Final = 64 * 2**20


class SeenLoss(NamedTuple):
    """Arguments and value of a loss function for a micro-batch, copied, because it may overwrite its arguments.

    Attributes:
        output: of the last layer.
        target: of the micro-batch.
        places: the addresses of the target's tensors before they were copied.
        value: the loss.
    """

    output: Message
    target: Message
    places: tuple[int, ...]
    value: Tensor


@dataclass  # not frozen: made for each step, and a frozen one takes twice as long
class InnerLoss:
    """Computes a micro-batch's part of the mini-batch's loss from its output.

    Attributes:
        function: from output and target to the loss; None: the last layer takes the target as its last positional
            argument and returns the loss.
        weights: the factor of each micro-batch's loss, with the call's `loss_scale`; None: none has one. A tensor is on
            the device of the loss: the caller's stream computes it, and the host may not know its value yet.
        seed_scale: gradients carry this factor, so that small ones survive in float16; a tensor as for a weight.
        keeps_output: whether the output is returned with the loss.
        micro_batches: their number.
        seen: gets some micro-batches, whose numbers it has; None: nothing is kept in this mini-batch.
    """

    function: Callable[[Any, Any], Tensor] | None
    weights: tuple[float | Tensor, ...] | None = None
    seed_scale: float | Tensor = 1.0
    keeps_output: bool = False
    micro_batches: int = 1
    seen: dict[int, SeenLoss | None] | None = None

    @cached_property
    def counted(self) -> frozenset[int]:
        """The micro-batches whose loss has a weight other than 0, as far as is known without waiting for a device."""
        weights = self.weights or (1.0,) * self.micro_batches
        return frozenset([n for n, weight in enumerate(weights) if isinstance(weight, Tensor) or weight])

    @property
    def source(self) -> str:
        """What returns the loss, for messages."""
        if self.function is None:
            return "the last layer"
        name = getattr(self.function, "__name__", None) or type(self.function).__name__
        return str(getattr(self.function, "pipework_source", f"loss_fn ({name})"))

    @property
    def form(self) -> tuple[Any, ...]:
        """What graphs cannot change of it: numbers, but for the weights."""
        scale = None if isinstance(self.seed_scale, Tensor) else self.seed_scale
        return self.weights is None, scale, self.keeps_output, self.micro_batches

    def seed_scale_in(self, dtype: torch.dtype) -> float | Tensor:
        """The seed of a backward, rounded to the dtype of the loss."""
        if isinstance(self.seed_scale, Tensor):
            return self.seed_scale.to(dtype)
        if self.seed_scale == 1.0:
            return 1.0
        return torch.full((), self.seed_scale, dtype=dtype, device="cpu").item()

    def part(self, value: Any, micro_batch: int) -> Tensor:
        """The micro-batch's part of the loss: the computed value times its weight.

        Args:
            value: returned by the function, or by the last layer.
            micro_batch: its number.

        Raises:
            TypeError: the value is no tensor of real numbers.
            ValueError: the tensor is not 0-dimensional.
        """
        if not isinstance(value, Tensor) or value.dim() or value.is_complex():
            raise self._no_loss(value)
        if self.weights is None:
            return value
        weight = self.weights[micro_batch]
        if isinstance(weight, Tensor):
            return torch.where(weight == 0, 0.0, _times(value, weight))
        # A weight of 0 gives 0: the mean over no element is NaN, and so is 0 x NaN.
        return value * weight if weight else value.new_zeros(())

    def _no_loss(self, value: Any) -> TypeError | ValueError:
        if not isinstance(value, Tensor):
            hint = "return the loss alone, as a tensor: without .item() or float()"
            if self.function is None:
                hint = "give the pipe a loss_fn, or let its last layer take the target and return the loss"
            kind = type(value).__name__
            return TypeError(f"{self.source} returned {kind}, wanted the loss as a 0-dimensional tensor: {hint}")
        if value.is_complex():
            return TypeError(f"{self.source} returned a complex loss ({value.dtype}), wanted a real one: take .abs()")
        return ValueError(
            f"{self.source} returned a tensor of shape {tuple(value.shape)}, wanted a 0-dimensional loss: reduce it, "
            "for example with reduction='mean', or with .mean()"
        )


def _times(loss: Tensor, weight: Tensor) -> Tensor:
    """The product that a number would give: it is not rounded to 16 bits before it multiplies."""
    wide = torch.promote_types(loss.dtype, torch.float32)
    return (loss.to(wide) * weight.to(wide)).to(loss.dtype)


def mean_weights(amounts: Sequence[float] | Tensor) -> tuple[float | Tensor, ...]:
    """Each micro-batch's share in a mean; NaN if the amounts sum to 0, as for every mean over nothing.

    Args:
        amounts: how much each micro-batch counts; a tensor stays on its device.

    Example:
        >>> mean_weights([3, 1])
        (0.75, 0.25)
    """
    if isinstance(amounts, Tensor):
        # Not every device has float64. Integers below 2^24 give the same share if they are divided in float32.
        wide = amounts.to(torch.float32 if amounts.device.type == "mps" else torch.float64)
        return (wide / wide.sum()).unbind()
    total = sum(amounts)
    return tuple([amount / total if total else math.nan for amount in amounts])


def total(parts: Sequence[Tensor]) -> Tensor:
    """The mini-batch's loss: its parts, added in the order of the micro-batches."""
    return functools.reduce(torch.add, [part.detach() for part in parts])


class LossRun:
    """The loss inside, in one mini-batch: the targets of its micro-batches, and what is computed from them.

    Args:
        loss: of a micro-batch.
        stage: the last one.
        trains: whether a parameter of the stage gets a gradient.

    Attributes:
        targets: by micro-batch, those that a forward or a recomputation still needs.
        is_of_layer: whether the last layer takes the target and returns the loss.
        trains: as above, or an input of the stage gets a gradient.
    """

    def __init__(self, loss: InnerLoss, stage: Stage, *, trains: bool) -> None:
        self._loss = loss
        self._stage = stage
        self.targets: dict[int, Message] = {}
        self.is_of_layer = loss.function is None
        self.trains = trains
        self._detached: set[int] = set()  # micro-batches whose loss has no graph

    def clear(self) -> None:
        """Drops every tensor."""
        self.targets.clear()
        self._loss.seen = None

    def receive(self, receive: Receive, receive_target: Receive, micro_batch: int) -> Message:
        """Waits for the stage's input, and for the target."""
        message = receive(micro_batch)
        self.targets[micro_batch] = receive_target(micro_batch)
        return message

    def receive_gradient(self, kept: Kept, micro_batch: int) -> Message:
        """The gradient of a micro-batch's loss, with which its backward starts; None if the loss has no graph.

        It has memory of its own, because a backward may overwrite it.
        """
        root: Any = kept.graphs[micro_batch][1][0]
        if root is None:
            return (None,), None
        scale = self._loss.seed_scale
        tensor = isinstance(scale, Tensor)
        return (root.new_empty(()).copy_(scale) if tensor else root.new_full((), scale),), None

    def outputs(
        self, output: Any, target: Any, micro_batch: int, enter_stream: Callable[[int, int], None] | None, *, grad: bool
    ) -> tuple[tuple[Tensor, ...], Structure | None]:
        """The outputs of the stage: the loss; then the output of its layers without a graph, if it is kept.

        Args:
            output: what the layers have returned.
            target: of the micro-batch.
            micro_batch: its number.
            enter_stream: called before the loss is computed, if random numbers may be drawn.
            grad: whether gradients are wanted.
        """
        loss, value = self._loss, output
        # Nothing is kept of other micro-batches, nor of a recomputation.
        is_seen = loss.seen is not None and loss.seen.get(micro_batch, loss) is None
        given = self._copied(output, target) if is_seen else None
        if loss.function is not None:
            if enter_stream is not None:
                enter_stream(self._stage.layers[-1].number + 1, micro_batch)
            try:
                value = loss.function(output, target)
            except BaseException as error:
                add_note(error, f"in {loss.source}")
                note_returned(error, output, self._stage.last_layer, "loss_fn")
                raise
        part = loss.part(value, micro_batch)
        if grad and not value.requires_grad and self._stage.training:
            self._see_detached(output, micro_batch)
        if given is not None and loss.seen is not None:
            loss.seen[micro_batch] = SeenLoss(*given, value.detach())
        if not loss.keeps_output:
            return (part,), None
        tensors, structure = nested.flatten(output)
        return (part, *(tensor.detach() for tensor in tensors)), structure

    def _copied(self, output: Any, target: Any) -> tuple[Message, Message, tuple[int, ...]] | None:
        """Copies of output and target, and where the target lies; None: they are large, or cannot be copied."""
        try:
            messages = nested.flatten(output), nested.flatten(target)
        except TypeError:  # a tensor with a gradient within an object
            return None
        every = [tensor for tensors, _ in messages for tensor in tensors]
        plain = all(type(tensor) is Tensor and tensor.layout is torch.strided for tensor in every)
        if not plain or sum(tensor.nbytes for tensor in every) > MOST_BYTES:
            return None
        of_output, of_target = ((tuple([t.detach().clone() for t in tensors]), around) for tensors, around in messages)
        return of_output, of_target, tuple([tensor.data_ptr() for tensor in messages[1][0]])

    def _see_detached(self, output: Any, micro_batch: int) -> None:
        """Raises a RuntimeError if no micro-batch's loss has a graph, although there is something to train."""
        loss = self._loss
        self._detached.add(micro_batch)
        if not self.trains or not loss.counted <= self._detached:  # a constant loss of some is nothing unusual
            return
        source, what = (self._stage.last_layer if loss.function is None else loss.source), "a loss"
        if loss.function is not None and not any(tensor.requires_grad for tensor in nested.flatten(output)[0]):
            source, what = self._stage.last_layer, "an output"
        raise RuntimeError(
            f"{source} returned {what} without a graph, so no parameter would get a gradient: .detach(), .item(), "
            "torch.tensor(...), .argmax() or torch.no_grad() in it cuts the graph. Return what was computed from "
            "its input; where only the value is wanted, call the pipe under torch.no_grad()"
        )
