"""Counts the bytes that micro-batches hold for their backwards, while a mini-batch is recorded."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from pipework import torch_private
from pipework.values.dtensor import local_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from pipework.runtime.host_memory import HostMemory


class MemoryMeter:
    """Live activation bytes of one worker: its stages' inputs and what their graphs save, but no parameters or buffers.

    A stage holds all its inputs until its backward, also an input that no graph saves: the backward computes their
    gradients. A storage counts once per stage and micro-batch, however often it is saved.

    Args:
        persistent: tensors that are not counted, such as parameters.
        host: to which the worker's activations go, and of these some are not free yet; None: none go.
    """

    def __init__(self, persistent: Iterable[Tensor], host: HostMemory | None = None) -> None:
        self._host = host
        self._persistent = {_storage(tensor) for tensor in persistent}
        self._held: dict[tuple[int, int], int] = {}
        self._inputs: dict[tuple[int, int], dict[int, int]] = {}
        self._peak = 0
        self._sent = 0

    @contextlib.contextmanager
    def measuring(
        self, stage: int, micro_batch: int, inputs: Iterable[Tensor], target: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """Counts the inputs and what is saved inside as held for this micro-batch of the stage, until `released`."""
        # The caller's micro-batches are slices of one storage; each holds its own rows.
        of_inputs = {_storage(tensor): local_part(tensor).nbytes for tensor in inputs}
        self._inputs[stage, micro_batch] = of_inputs
        own = {_storage(tensor): local_part(tensor).nbytes for tensor in target} | of_inputs
        sizes: dict[int, int] = {}
        if torch.is_grad_enabled():  # without a backward to come, nothing is kept
            sizes = {key: size for key, size in of_inputs.items() if key not in self._persistent}
        # PyTorch calls the innermost hooks only, so these must call the user's.
        outer = torch_private.saved_tensor_hooks()

        def pack(tensor: Tensor) -> Any:
            storage = local_part(tensor).untyped_storage()
            key = torch_private.storage_key(storage)
            if key not in self._persistent:
                sizes[key] = own.get(key, storage.nbytes())
            if outer is not None:
                return outer[0](tensor)
            return packed(tensor)

        def unpack(saved: Any) -> Tensor:
            return unpacked(saved) if outer is None else outer[1](saved)

        twice = outer is None or getattr(outer[1], "may_be_called_twice", False)
        unpack.may_be_called_twice = twice  # type: ignore[attr-defined]

        with saved_tensors_hooks(uncompiled(pack), unpack):
            yield
        self._hold(stage, micro_batch, sum(sizes.values()))

    def checkpointed(self, stage: int, micro_batch: int, kept: Iterable[Tensor]) -> None:
        """After the first pass of a checkpointed micro-batch: only its inputs and copies of buffers are kept."""
        self._hold(stage, micro_batch, sum(local_part(tensor).nbytes for tensor in kept))

    def waiting(self, stage: int, micro_batch: int, kept: Iterable[Tensor]) -> None:
        """After the I of a micro-batch: the tensors that its W needs are kept."""
        storages = [local_part(tensor).untyped_storage() for tensor in kept]
        sizes = {torch_private.storage_key(storage): storage.nbytes() for storage in storages}
        sizes |= {key: size for key, size in self._inputs[stage, micro_batch].items() if key in sizes}
        self._hold(stage, micro_batch, sum(size for key, size in sizes.items() if key not in self._persistent))

    def moved(self, stage: int, micro_batch: int, size: int) -> None:
        """After an O (a negative number of bytes) or an L of a micro-batch."""
        self._hold(stage, micro_batch, self._held[stage, micro_batch] + size)

    def released(self, stage: int, micro_batch: int) -> None:
        """After the backward of a micro-batch: it holds nothing."""
        self._held.pop((stage, micro_batch), None)
        self._inputs.pop((stage, micro_batch), None)

    def sending(self, tensors: Iterable[Tensor]) -> None:
        """Counts the tensors that an action sends to other stages."""
        self._sent += sum(local_part(tensor).nbytes for tensor in tensors)

    def read(self, stage: int, micro_batch: int) -> tuple[int, int, int]:
        """The most bytes held at once since the last call, the bytes of a micro-batch now, and the bytes sent."""
        peak, self._peak = self._peak, self._all
        sent, self._sent = self._sent, 0
        return peak, self._held.get((stage, micro_batch), 0), sent

    def _hold(self, stage: int, micro_batch: int, size: int) -> None:
        self._held[stage, micro_batch] = size
        self._peak = max(self._peak, self._all)

    @property
    def _all(self) -> int:
        return sum(self._held.values()) + (0 if self._host is None else self._host.leaving)


def uncompiled(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The hook of a context around layers: what `torch.compile` made of a layer would compile the hook, too."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook  # type: ignore[no-untyped-call]


def packed(tensor: Tensor) -> tuple[Tensor, int]:
    """What hooks save of a tensor: not itself, since an output that its own node saves would be a reference cycle.

    The version is kept because autograd does not check that of tensors that hooks have packed.
    """
    return tensor.detach(), torch_private.counted_version(tensor)


def unpacked(saved: tuple[Tensor, int]) -> Tensor:
    """The tensor of `packed`; see `refuse_changed`."""
    tensor, version = saved
    refuse_changed(tensor, version, tensor.shape)
    return tensor


def refuse_changed(tensor: Tensor, version: int, shape: Sequence[int]) -> None:
    """Raises a RuntimeError if a saved tensor has been changed in place: of hooks, PyTorch does not check it."""
    if (now := torch_private.counted_version(tensor)) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(shape)} is at version {now}; expected version {version} instead"
        )


def _storage(tensor: Tensor) -> int:
    """The storage of a tensor, or of its local part; the same one when it is freed and allocated again."""
    return torch_private.storage_key(local_part(tensor).untyped_storage())
