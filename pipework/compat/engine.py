"""The `Pipe` that works inside of an adapter: it cuts mini-batches as the old libraries did."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipework import microbatch
from pipework.pipe import Pipe
from pipework.runtime.tuples import TupleRule


class TupleKeeping(nn.Sequential):
    """Layers of which each gets a tuple as one argument, as in torchgpipe and fairscale."""

    tuples: ClassVar[TupleRule] = TupleRule.WHOLE


class Engine(Pipe):
    """Cuts every tensor with `torch.chunk`, by itself.

    Nine rows in eight chunks are five micro-batches then, and tensors need not have the same number of rows if as many
    pieces come out.
    """

    def use(self, chunks: int, checkpoint: str) -> None:
        """Sets what the old pipes let their users change after the construction."""
        self._chunks = chunks
        self._checkpoint = checkpoint

    def forward(self, *inputs: Any, **keyword_inputs: Any) -> Any:
        """As `Pipe.forward`; outputs are laid out in memory as if they had been concatenated, also a single one."""
        output = super().forward(*inputs, **keyword_inputs)
        if type(output) is tuple:
            return tuple([_as_concatenated(each) for each in output])
        return _as_concatenated(output)

    def _split(self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]) -> microbatch.Split:
        tensors, structure, is_split = microbatch.flattened((inputs, keyword_inputs))
        sizes = tuple(
            [_sizes(tensor, self._chunks) if split else None for tensor, split in zip(tensors, is_split, strict=True)]
        )
        counts = list(dict.fromkeys(len(each) for each in sizes if each is not None))
        if not counts:
            raise TypeError(f"inputs do not have any tensors: {inputs}")
        if len(counts) > 1:
            raise RuntimeError(f"Found different number of chunks produced for inputs: {counts[0]} and {counts[1]}")
        return microbatch.Split.of(tensors, sizes, structure)


def _as_concatenated(value: Any) -> Any:
    """Old code may call `view` on an output that a layer has transposed."""
    if not isinstance(value, Tensor) or value.is_contiguous():
        return value
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if value.dim() in formats and value.is_contiguous(memory_format=formats[value.dim()]):
        return value
    return torch.cat([value])


def _sizes(tensor: Tensor, chunks: int) -> list[int]:
    return [len(piece) for piece in tensor.detach().chunk(chunks)]
