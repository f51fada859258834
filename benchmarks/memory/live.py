"""Which tensor memory is really alive, and whose it is: seen at every operator, without asking the pipe.

A dispatch mode, which the pipe takes along to its workers, sees what every operator returns, in forward and in
backward, and notes when a storage that it has not seen before appears and when it is freed. Nothing here knows of
micro-batches, of what autograd saves or of what the runtime keeps. Under a mode one thread runs all workers' actions.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CALLER = -1  # the owner of storages that no worker allocates
ON_ITS_WAY = -2  # the owner of a copy that its receiver has not taken yet


@dataclass
class Block:
    """One storage.

    Attributes:
        owner: the worker that it belongs to, or `CALLER`.
        size: in bytes.
        gradient: it was made by a backward, or is a copy of what was.
        label: what it is for, as `LiveStorages.label` was told; else empty.
    """

    owner: int
    size: int
    gradient: bool
    label: str = ""


class LiveStorages:
    """All storages that appear and disappear while `watching`.

    Attributes:
        events: in the order of time: +1 and a block that appears, -1 and a block that is freed, or 0 and an empty block
            of a worker at which a backward begins, or for which `moment` was called.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, Block]] = []
        self._live: dict[int, tuple[Block, Any]] = {}
        self._lock = threading.RLock()  # a callback may come while the same thread holds it
        self._thread = threading.local()
        self._watching = False
        self._old: set[int] = set()

    def belongs_to(self, worker: int) -> None:
        """What this thread allocates belongs to this worker from now on: an action of it begins."""
        self._thread.owner = worker
        self._thread.in_backward = False

    @contextmanager
    def watching(self, old: Iterable[Tensor]) -> Iterator[None]:
        """Notes everything that appears inside, on this thread, too, and that is not the memory of old tensors."""
        self.events.clear()
        self._live.clear()
        self._old = {tensor.untyped_storage()._cdata for tensor in old}
        self._watching = True
        try:
            with _Mode(self):
                yield
        finally:
            self._watching = False

    def copied(self, tensor: Tensor, owner: int) -> Tensor:
        """A copy in another worker's memory."""
        before = getattr(self._thread, "owner", CALLER)
        block, _ = self._live.get(tensor.untyped_storage()._cdata, (None, None))
        self._thread.owner = owner
        self._thread.gradient = block is not None and block.gradient
        try:
            with torch.no_grad():
                return tensor.clone().requires_grad_(tensor.requires_grad)
        finally:
            self._thread.owner = before
            self._thread.gradient = False

    def taken(self, tensors: Iterable[Tensor | None], owner: int) -> None:
        """From now on the memory of these tensors is this worker's."""
        with self._lock:
            for tensor in tensors:
                key = None if tensor is None else tensor.untyped_storage()._cdata
                if key in self._live:
                    block, reference = self._live[key]
                    mine = replace(block, owner=owner)
                    self._live[key] = mine, reference
                    self.events += [(-1, block), (+1, mine)]

    def moment(self, owner: int) -> None:
        """Notes that a worker is between two actions; unlike a backward that begins, as no gradient."""
        if self._watching:
            with self._lock:
                self.events.append((0, Block(owner, 0, gradient=False)))

    def see(self, tensors: Iterable[Tensor], *, in_backward: bool) -> None:
        """What an operator has returned."""
        if not self._watching:
            return
        owner = getattr(self._thread, "owner", CALLER)
        with self._lock:
            if in_backward and not getattr(self._thread, "in_backward", False):
                self.events.append((0, Block(owner, 0, gradient=True)))
            self._thread.in_backward = in_backward
            for tensor in tensors:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if size and key not in self._live and key not in self._old:
                    block = Block(owner, size, in_backward or getattr(self._thread, "gradient", False))
                    # It dies with the memory, not with this Python object, which PyTorch keeps for a storage in use.
                    self._live[key] = (block, weakref.ref(storage, lambda _, key=key: self._freed(key)))
                    self.events.append((+1, block))

    def label(self, tensors: Iterable[Tensor], label: str) -> None:
        """Says what the memory of these tensors is for."""
        with self._lock:
            for tensor in tensors:
                block, _ = self._live.get(tensor.untyped_storage()._cdata, (None, None))
                if block is not None:
                    block.label = label

    def alive(self) -> int:
        """The bytes that are alive now, of all owners."""
        with self._lock:
            return sum(block.size for block, _ in self._live.values())

    def peak(self, owner: int, counted: Callable[[Block], bool]) -> int:
        """The most bytes of an owner that were alive at once."""
        return max((held for _, held in self._history(owner, counted)), default=0)

    def peak_kept(self, owner: int, counted: Callable[[Block], bool]) -> int:
        """The most bytes of an owner that were alive when one of its backwards began: no forward's temporaries."""
        return max((held for sign, held in self._history(owner, counted) if not sign), default=0)

    def _history(self, owner: int, counted: Callable[[Block], bool]) -> Iterator[tuple[int, int]]:
        held = 0
        for sign, block in self.events:
            if block.owner == owner and (not sign or counted(block)):
                held += sign * block.size
                yield sign, held

    def _freed(self, key: int) -> None:
        with self._lock:
            if key in self._live:
                self.events.append((-1, self._live.pop(key)[0]))


class _Mode(TorchDispatchMode):
    """Shows every operator's results to the tracker."""

    def __init__(self, storages: LiveStorages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._storages.see(tensors, in_backward=torch._C._current_autograd_node() is not None)
        return result
