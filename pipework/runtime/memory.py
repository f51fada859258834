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
    """Live activation bytes of one worker: what its stages' graphs save, without parameters and buffers.

    A storage counts once per stage and micro-batch, however often it is saved.

    Args:
        persistent: tensors that live anyway and are not counted.
    """

    def __init__(self, persistent: Iterable[Tensor]) -> None:
        self._persistent = {tensor.untyped_storage().data_ptr() for tensor in persistent}
        self._held: dict[tuple[int, int], int] = {}
        self._peak = 0

    @contextlib.contextmanager
    def measuring(self, stage: int, micro_batch: int, inputs: Iterable[Tensor]) -> Iterator[None]:
        """Counts what is saved inside as held for this micro-batch of the stage, until it is `released`."""
        sizes: dict[int, int] = {}
        # The caller's micro-batches are slices of one storage, of which each holds its own rows.
        own = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in inputs}
        outer = engine.saved_tensor_hooks()  # only the innermost hooks are called, so these must call the user's own

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in self._persistent:
                sizes[address] = own.get(address, storage.nbytes())
            return tensor if outer is None else outer[0](tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if outer is None else outer[1](packed)

        with saved_tensors_hooks(pack, unpack):
            yield
        self._hold(stage, micro_batch, sum(sizes.values()))

    def checkpointed(self, stage: int, micro_batch: int, inputs: Iterable[Tensor]) -> None:
        """After the first pass of a checkpointed micro-batch: only its inputs are kept."""
        self._hold(stage, micro_batch, sum(tensor.nbytes for tensor in inputs))

    def released(self, stage: int, micro_batch: int) -> None:
        """After the backward of a micro-batch: nothing of it is kept."""
        self._held.pop((stage, micro_batch), None)

    def peak(self) -> int:
        """The most bytes held at once since the last call."""
        peak, self._peak = self._peak, sum(self._held.values())
        return peak

    def _hold(self, stage: int, micro_batch: int, size: int) -> None:
        self._held[stage, micro_batch] = size
        self._peak = max(self._peak, sum(self._held.values()))
