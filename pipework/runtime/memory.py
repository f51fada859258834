"""Counts the bytes that autograd keeps for the micro-batches in flight on one stage, while a mini-batch is recorded."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import saved_tensors_hooks

from pipework.runtime import engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


class MemoryMeter:
    """Live activation bytes of one stage: what its graphs save, without parameters and buffers.

    A storage counts once per micro-batch, however often it is saved.

    Args:
        persistent: tensors that live anyway and are not counted.
    """

    def __init__(self, persistent: Iterable[Tensor]) -> None:
        self._persistent = {tensor.untyped_storage().data_ptr() for tensor in persistent}
        self._held: dict[int, int] = {}
        self._peak = 0

    @contextlib.contextmanager
    def measuring(self, micro_batch: int) -> Iterator[None]:
        """Counts what is saved inside as held for this micro-batch, until it is `released`."""
        sizes: dict[int, int] = {}
        outer = engine.saved_tensor_hooks()  # only the innermost hooks are called, so these must call the user's own

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._persistent:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor if outer is None else outer[0](tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if outer is None else outer[1](packed)

        with saved_tensors_hooks(pack, unpack):
            yield
        self._hold(micro_batch, sum(sizes.values()))

    def checkpointed(self, micro_batch: int, inputs: Iterable[Tensor]) -> None:
        """After the first pass of a checkpointed micro-batch: only its inputs are kept."""
        self._hold(micro_batch, sum(tensor.nbytes for tensor in inputs))

    def released(self, micro_batch: int) -> None:
        """After the backward of a micro-batch: nothing of it is kept."""
        self._held.pop(micro_batch, None)

    def peak(self) -> int:
        """The most bytes held at once since the last call."""
        peak, self._peak = self._peak, sum(self._held.values())
        return peak

    def _hold(self, micro_batch: int, size: int) -> None:
        self._held[micro_batch] = size
        self._peak = max(self._peak, sum(self._held.values()))
