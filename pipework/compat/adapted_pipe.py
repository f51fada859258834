"""The `Pipe` inside of an adapter: it splits mini-batches and orders backwards as the old libraries did."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from pipework.compat.backward_order import from_last_to_first
from pipework.executor import Executor
from pipework.model import mini_batch
from pipework.model.marks import flattened
from pipework.model.sequential import TupleRule, named_layers
from pipework.pipe import Pipe
from pipework.torch_private import pytree
from pipework.values import nested

if TYPE_CHECKING:
    from pipework.runtime.program import Program
    from pipework.schedule import Schedule

Kind = TypeVar("Kind", bound=nn.Sequential)


class TupleKeeping(nn.Sequential):
    """Layers that get a tuple as one argument, as in torchgpipe and fairscale."""

    _tuple_rule: ClassVar[TupleRule] = TupleRule.WHOLE


def sequence(kind: type[Kind], module: nn.Sequential) -> Kind:
    """A sequence of another class with the layers of a module."""
    layers = kind(OrderedDict(named_layers(module)))
    layers.training = module.training
    return layers


@dataclass(frozen=True)
class Whole:
    """An input whose tensors are not split, also inside of nested structures."""

    value: Any


class AdaptedExecutor(Executor):
    """Splits each tensor separately with `torch.chunk`, and runs backwards from the last micro-batch to the first.

    Nine rows in eight chunks become five micro-batches, and tensors may have different numbers of rows if they are
    split into equally many pieces.
    """

    warns: ClassVar[bool] = False  # old scripts run as they did

    def _checked(self, schedule: Schedule) -> Program:
        program = super()._checked(schedule)
        return replace(program, schedule=from_last_to_first(program.schedule))

    def _split(self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]) -> mini_batch.MiniBatch:
        whole: list[Tensor] = []
        unwrapped = tuple([_unwrapped(each, whole) for each in inputs])
        tensors, structure, marks = flattened((unwrapped, keyword_inputs))
        kept = {id(tensor) for tensor in whole}
        sizes = tuple(
            [
                _sizes(tensor, self.chunks) if mark is None and id(tensor) not in kept else None
                for tensor, mark in zip(tensors, marks, strict=True)
            ]
        )
        counts = list(dict.fromkeys(len(each) for each in sizes if each is not None))
        if not counts:
            raise TypeError(f"inputs do not have any tensors: {inputs}")
        if len(counts) > 1:
            raise RuntimeError(f"Found different number of chunks produced for inputs: {counts[0]} and {counts[1]}")
        return mini_batch.MiniBatch.of(tensors, sizes, structure)


class AdaptedPipe(Pipe):
    """A pipe with such an executor."""

    _executor_type: ClassVar[type[Executor]] = AdaptedExecutor

    def use(self, chunks: int, checkpoint: str) -> None:
        """Sets the attributes that can be changed after the construction of an old pipe."""
        self._executor.chunks = chunks
        self._executor.checkpoint = checkpoint

    def forward(self, *inputs: Any, **keyword_inputs: Any) -> Any:
        """As `Pipe.forward`, but outputs never share memory with tensors of the layers.

        The outputs of several micro-batches are concatenated. The old libraries also copied the output of a single
        micro-batch, so that scripts could overwrite it.
        """
        output = super().forward(*inputs, **keyword_inputs)
        if self.chunks == 1 or any(isinstance(each, Tensor) and len(each) == 1 for each in pytree.tree_leaves(inputs)):
            tensors, structure = nested.flatten(output)
            return nested.unflatten(tuple(map(_concatenated, tensors)), structure)
        return output


def _unwrapped(value: Any, whole: list[Tensor]) -> Any:
    """The input without its wrapper; adds tensors that are not split to `whole`."""
    if not isinstance(value, Whole):
        return value
    tensors, structure = nested.flatten(value.value)
    views = tuple([tensor.view_as(tensor) for tensor in tensors])  # another input may be the same tensor
    whole += views
    return nested.unflatten(views, structure) if views else value.value


def _concatenated(tensor: Tensor) -> Tensor:
    return torch.cat([tensor]) if tensor.dim() else tensor.clone()


def _sizes(tensor: Tensor, chunks: int) -> list[int]:
    return [len(piece) for piece in tensor.detach().chunk(chunks)]
