"""What a loss function got and gave for the first two micro-batches, to be looked at after the mini-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.values.nested import Structure

# A loss of more numbers than this is mostly one over words, and copies of its outputs would be felt.
MOST_BYTES: Final = 64 * 2**20


class Kept(NamedTuple):
    """An output or a target: copies of its tensors, for a loss may overwrite them, the rest, and where they were."""

    tensors: tuple[Tensor, ...]
    structure: Structure | None
    places: tuple[int, ...]


class LossSample:
    """Copies of the outputs and targets of two micro-batches, and their losses, until the end of the mini-batch.

    They are as large as those themselves, and not kept above `MOST_BYTES`.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Kept, Kept]] = []
        self._values: list[Tensor] = []

    def keep(self, micro_batch: int, output: Any, target: tuple[Sequence[Tensor], Any]) -> None:
        """Before the function is called.

        Args:
            micro_batch: its number.
            output: of the last layer.
            target: its tensors, and the whole.
        """
        if micro_batch != len(self._pairs) or micro_batch > 1:
            return  # a recomputation, or one that is not needed
        try:
            tensors, structure = nested.flatten(output)
            of_target, around = nested.flatten(target[1])
        except TypeError:  # a tensor with a gradient within an object
            return
        every = (*tensors, *of_target)
        plain = all(type(tensor) is Tensor and tensor.layout is torch.strided for tensor in every)
        if not plain or sum(tensor.nbytes for tensor in every) > MOST_BYTES:
            return
        self._pairs.append((_kept(tensors, structure), _kept(of_target, around)))

    def gave(self, micro_batch: int, value: Any) -> None:
        """After the function has been called: what it returned, for this micro-batch."""
        if micro_batch == len(self._values) < len(self._pairs):
            self._values.append(value.detach())

    def take(self) -> tuple[list[tuple[Kept, Kept]], list[Tensor]]:
        """The outputs with targets, and the losses. Nothing stays here."""
        taken = self._pairs, self._values
        self._pairs, self._values = [], []
        return taken


def _kept(tensors: tuple[Tensor, ...], structure: Structure | None) -> Kept:
    copies = tuple([tensor.detach().clone() for tensor in tensors])
    return Kept(copies, structure, tuple([tensor.data_ptr() for tensor in tensors]))
