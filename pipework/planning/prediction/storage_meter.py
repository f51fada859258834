"""Counts the bytes that one thread's operators have in use on a device, at every moment."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipework import torch_private
from pipework.autograd.weight_split.detached_graph import tensors_among
from pipework.runtime.device import is_accelerator
from pipework.torch_private import memory_key

if TYPE_CHECKING:
    from collections.abc import Iterable

_BLOCK = 512  # bytes; the allocators of accelerators round up to it


class StorageMeter(torch_private.DispatchMode):  # type: ignore[misc]
    """Counts the storages that operators make on a device while the mode is entered, and those that are freed since.

    It works on every device, also on the meta device, and changes no counter of an allocator. What an operator needs
    for itself, such as a workspace of cuDNN, is seen where the allocator counts what it has freed (CUDA's does). What a
    library keeps from then on, as cuBLAS does for each thread and stream, does not count.

    Args:
        device: others do not count.
        present: tensors that were there before; they do not count, either.

    Attributes:
        live: bytes in use now.
        peak: the most since `begin`.
        mean: over the operators since `begin`.

    Example:
        >>> import torch
        >>> meter = StorageMeter(torch.device("cpu"))
        >>> with meter:
        ...     x = torch.zeros(256)
        ...     y = (x + 1).sum()
        >>> meter.live, meter.peak
        (1028, 2052)
    """

    def __init__(self, device: torch.device, present: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._device = device
        self._block = _BLOCK if is_accelerator(device) else 1
        self._sizes: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._freed = weakref.WeakMethod(self._free)  # what is counted must not keep the meter, which keeps tensors
        self._not_counted = list(present)  # kept, so that no other storage gets one of their addresses
        self._present = {torch_private.storage_key(tensor.untyped_storage()) for tensor in self._not_counted}
        self.live = self.peak = self._sum = self._operators = 0

    @property
    def mean(self) -> int:
        """See the class."""
        return self._sum // max(1, self._operators)

    def begin(self) -> int:
        """The peak begins at what is in use now, which is returned."""
        self.peak = self.live
        self._sum = self._operators = 0
        return self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator, and counts what it has made."""
        before = self._freed_so_far()
        result = func(*args, **(kwargs or {}))
        temporary = self._freed_so_far() - before
        self._operators += 1
        self._sum += self.live
        new = [tensor for tensor in tensors_among(result) if tensor.device == self._device and not self._knows(tensor)]
        if new:
            # A view of a tensor that is not known, such as a constant of a layer, makes nothing.
            given = {memory_key(tensor) for tensor in tensors_among((args, tuple((kwargs or {}).values())))}
            for tensor in new:
                if memory_key(tensor) not in given:
                    self._count(tensor)
        self.peak = max(self.peak, self.live + temporary)
        return result

    def _freed_so_far(self) -> int:
        stats = torch.accelerator.memory_stats(self._device) if is_accelerator(self._device) else {}
        return int(stats.get("allocated_bytes.all.freed", 0))

    def _knows(self, tensor: Tensor) -> bool:
        key = memory_key(tensor)
        return key is None or key in self._sizes or key in self._present

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = torch_private.storage_key(storage)
        if key in self._sizes:  # an operator with two results in one storage
            return
        size = -(-storage.nbytes() // self._block) * self._block
        self._sizes[key] = size, weakref.ref(storage, functools.partial(_call, self._freed, key))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)[0]


def _call(method: weakref.WeakMethod[Any], key: int, storage: object) -> None:
    if (free := method()) is not None:
        free(key)
