"""The loss inside, in one mini-batch: the targets of its micro-batches, and what the last stage computes from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pipework.runtime.failure import add_note
from pipework.runtime.stage.loss import SeenLoss
from pipework.runtime.stage.returned import layer_text, note_returned
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.stage.stage import Stage
    from pipework.runtime.transport import Message
    from pipework.values.nested import Structure

# A loss of more numbers than this is mostly one over words, and outputs that are kept longer would be felt.
MOST_BYTES: Final = 64 * 2**20


class LossRun:
    """The loss of one mini-batch.

    Args:
        loss: of a micro-batch.
        stage: the last one.
        trains: whether a parameter of the stage gets a gradient.

    Attributes:
        targets: for each micro-batch the tensors, and the whole.
        taker: the number of the layer that takes the target; -1: none does.
        trains: as above, or an input of the stage gets a gradient.
        seeds: gradients of losses whose B is still to come; empty: the next B makes some.
    """

    def __init__(self, loss: InnerLoss, stage: Stage, *, trains: bool) -> None:
        self._loss = loss
        self._stage = stage
        self.targets: dict[int, tuple[tuple[Tensor, ...], Any]] = {}
        self.taker = stage.layers[-1].number if loss.function is None else -1
        self.trains = trains
        self._like: Tensor | None = None  # a loss
        self.seeds: list[Tensor] = []
        self._detached: set[int] = set()  # micro-batches whose loss has no graph

    def receive(self, micro_batch: int, message: Message) -> None:
        """Keeps a target until it is not needed any more."""
        tensors, around = message
        self.targets[micro_batch] = tensors, tensors[0] if around is None else nested.unflatten(tensors, around)

    def tensors(self, micro_batch: int) -> tuple[Tensor, ...]:
        """The tensors of a target that is kept."""
        return self.targets[micro_batch][0]

    def clear(self) -> None:
        """Drops every tensor."""
        self.targets.clear()
        self.seeds, self._like = [], None
        self._loss.seen = None

    def note_form(self, loss: Tensor) -> None:
        """Remembers the form of a loss, with the first one."""
        if self._like is None:
            self._like = loss.new_empty(())

    def gradients(self, outputs: int) -> tuple[Tensor | None, ...]:
        """The gradients of the outputs: the loss, which comes first, has one."""
        if not self.seeds:
            self._make_seeds()
        seed = self.seeds.pop()
        return (seed,) if outputs == 1 else (seed, *[None] * (outputs - 1))

    def _make_seeds(self) -> None:
        """Makes the gradients of all micro-batches' losses. Each has memory of its own: a backward may overwrite it."""
        like, scale = self._like, self._loss.scale
        assert like is not None, "F comes first"
        shape = (self._loss.micro_batches,) if type(like) is Tensor else ()
        seeds = like.new_empty(shape).copy_(scale) if isinstance(scale, Tensor) else like.new_full(shape, scale)
        self.seeds = list(seeds.unbind()) if shape else [seeds]

    def outputs(
        self, output: Any, micro_batch: int, enter_stream: Callable[[int, int], None] | None, *, grad: bool
    ) -> tuple[tuple[Tensor, ...], Structure | None]:
        """The outputs of the stage: the loss, and what its layers have returned if that is kept.

        Args:
            output: what they have returned.
            micro_batch: its number.
            enter_stream: before the loss is computed, if random numbers may be drawn.
            grad: whether gradients are wanted.
        """
        loss, value = self._loss, output
        # Of a recomputation, or of further micro-batches, nothing is kept.
        is_seen = loss.seen is not None and micro_batch == len(loss.seen) < 2
        given = self._copied(output, micro_batch) if is_seen else None
        if loss.function is not None:
            if enter_stream is not None:
                enter_stream(self._stage.layers[-1].number + 1, micro_batch)
            try:
                value = loss.function(output, self.targets[micro_batch][1])
            except BaseException as error:
                add_note(error, f"in loss_fn ({loss.description})")
                note_returned(error, output, self._last_layer, "loss_fn")
                raise
        if grad and isinstance(value, Tensor) and not value.requires_grad and self._stage.training:
            self._see_detached(output, micro_batch)
        part = loss.part(value, micro_batch)
        if given is not None and loss.seen is not None:
            loss.seen.append(SeenLoss(*given, value.detach()))
        return loss.with_output(part, output) if loss.keeps_output else ((part,), None)

    def _copied(self, output: Any, micro_batch: int) -> tuple[Message, Message, tuple[int, ...]] | None:
        """Copies of output and target, and where the target lies; None: they are large, or cannot be copied."""
        try:
            messages = nested.flatten(output), nested.flatten(self.targets[micro_batch][1])
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
        outputs, _ = nested.flatten(output)
        source, what = (self._last_layer if loss.function is None else loss.source), "a loss"
        if loss.function is not None and not any(tensor.requires_grad for tensor in outputs):
            source, what = self._last_layer, "an output"
        raise RuntimeError(
            f"{source} returned {what} without a graph, so no parameter would get a gradient: .detach(), .item(), "
            "torch.tensor(...), .argmax() or torch.no_grad() in it cuts the graph. Return what was computed from "
            "its input; where only the value is wanted, call the pipe under torch.no_grad()"
        )

    @property
    def _last_layer(self) -> str:
        return layer_text(self._stage.layers[-1].name, self._stage.layers[-1].module)
