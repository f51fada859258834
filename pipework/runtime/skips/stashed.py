"""What a stage passes on may be what it has stashed, and must not be overwritten while the skip is on its way.

The un-partitioned module would pop what the layer between has made of the tensor. Here each stage gets a value and
a skip of its own, on other devices and in other processes even copies. So that nobody computes something else without
a word, a value says which of its tensors share memory with a skip that goes further, and who overwrites one is refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipework.runtime.skips.connections import Skip
    from pipework.values.nested import Structure


class Stashed(NamedTuple):
    """Stands around the tensors of a value, some of which an earlier stage has stashed.

    Attributes:
        structure: that stands around them otherwise.
        which: the number of a tensor, and that of the skip.
    """

    structure: Structure | None
    which: tuple[tuple[int, int], ...]


class Arrived(NamedTuple):
    """An input of a stage that somebody has stashed.

    Attributes:
        number: of the input.
        skip: the number of the skip.
        tensor: the input.
        version: of it, before the layers run.
    """

    number: int
    skip: int
    tensor: Tensor
    version: int


def arrived_tensors(leaves: Sequence[Tensor], around: Stashed) -> list[Arrived]:
    """The inputs of a stage that somebody has stashed, before its layers run."""
    return [Arrived(n, skip, leaves[n], _version(leaves[n])) for n, skip in around.which]


class StashedTensors:
    """Those that go through one stage.

    Args:
        stage: its number.
        skips: all of the pipe.
    """

    def __init__(self, stage: int, skips: Sequence[Skip]) -> None:
        self._stage = stage
        self._skips = skips
        self._further = {n for n, skip in enumerate(skips) if skip.source <= stage < max(skip.destinations)}

    def refuse_overwritten(self, arrived: Sequence[Arrived], copies: Sequence[Tensor] = ()) -> None:
        """After the layers have run.

        Args:
            arrived: what somebody has stashed.
            copies: fresh copies of all inputs, if the layers were given those.

        Raises:
            RuntimeError: they have changed one of them in place.
        """
        for n, skip, tensor, version in arrived:
            if _version(tensor) != version or (copies and _version(copies[n])):
                key, source = self._skips[skip].key, self._skips[skip].source
                name = key[1] if isinstance(key, tuple) else key
                raise RuntimeError(
                    f"stage {self._stage} has changed skip tensor {name!r} in place after it was stashed by stage "
                    f"{source}, and it is still to be popped; stash a clone, or make that layer not in-place"
                )

    def around(
        self,
        structure: Structure | None,
        outputs: Sequence[Tensor],
        arrived: Sequence[Arrived],
        stashed: Sequence[tuple[int, Tensor]],
    ) -> Structure | Stashed | None:
        """What stands around the stage's outputs.

        Args:
            structure: otherwise.
            outputs: what goes to the next stage.
            arrived: among the inputs.
            stashed: by the stage itself, with the number of the skip.
        """
        tensors = [*((each.skip, each.tensor) for each in arrived), *stashed]
        which = [
            (n, skip)
            for skip, tensor in tensors
            if skip in self._further
            for n, output in enumerate(outputs)
            if _share_memory(tensor, output)
        ]
        return Stashed(structure, tuple(which)) if which else structure


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else torch_private.version(tensor)  # in inference mode nobody counts


def _share_memory(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have an element in common, or may have, as far as that is told by their places in memory."""
    if not (_has_place(one) and _has_place(two)):
        return False
    (begin, end), (other_begin, other_end) = _extent(one), _extent(two)
    return begin < other_end and other_begin < end and not _are_parts(one, two)


def _has_place(tensor: Tensor) -> bool:
    """Whether there is memory of its own class; one on the meta device, or that wraps others, has none."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return plain and tensor.numel() > 0 and tensor.data_ptr() != 0


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses from and up to which it lies."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + last) * tensor.element_size()


def _are_parts(one: Tensor, two: Tensor) -> bool:
    """Whether they are parts of one array that lie side by side in one of its dimensions, as two halves of channels."""
    if one.stride() != two.stride() or one.dtype != two.dtype:
        return False
    here, there = int(one.storage_offset()), int(two.storage_offset())
    outer, apart = math.inf, False
    for stride, size, other_size in sorted(zip(one.stride(), one.shape, two.shape, strict=True), reverse=True):
        if not stride:
            return False
        (begin, here), (other_begin, there) = divmod(here, stride), divmod(there, stride)
        end, other_end = begin + size, other_begin + other_size
        if outer < math.inf and max(end, other_end) * stride > outer:
            return False  # places along this dimension reach into the next one's: they are no array's
        apart = apart or end <= other_begin or other_end <= begin
        outer = stride
    return apart
