"""Offload: what a micro-batch holds on a stage is in host memory from its O to its L.

    F   1 autograd saves tensors: it gets a `Saved` for each, and there is a `Memory` for each storage
    O   2 the memories that nothing else uses go to the host; of a recomputed micro-batch, those of its inputs
    L   3 they come back
    B   4 autograd asks for a saved tensor: a view of its memory, with the strides and the alignment that it had

Memory that a layer, another stage or the caller uses, too, would not be freed: it stays, as parameters and buffers do.
What graphs of several micro-batches have saved moves with each of them, and is freed when no graph has it any more.
So nobody can change what is on its way. Between 1 and 4 each tensor has the version counter that it had, so a change in
place is PyTorch's usual error.

The leaves of a graph stay. Those that wait for a recomputation are emptied, and get memory again: layers have never
seen these objects. The first stage's are the caller's, and stay, too.

Hooks of the caller decide for themselves what becomes of a saved tensor, and it is not moved.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipework import torch_private
from pipework.runtime.stage.memory_meter import packed, refuse_changed, uncompiled, unpacked
from pipework.torch_private import MemoryView

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set

    from pipework.runtime.host_memory import Stored
    from pipework.runtime.stage.kept import Kept
    from pipework.runtime.stage.stage import Stage
    from pipework.schedule import Action


class Memory:
    """The memory of some saved tensors, or inputs.

    Attributes:
        storage: None: it is on the host.
    """

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage


class Saved:
    """A tensor without its memory.

    Args:
        tensor: which can be moved, see `movable`.
        memory: of the tensor.
        empty: of the tensor's type and device, without elements.
    """

    __slots__ = ("_expected", "_memory", "_version_counter", "_view")

    def __init__(self, tensor: Tensor, memory: Memory, empty: Tensor) -> None:
        self._memory, self._view, self._expected = memory, MemoryView.of(tensor), torch_private.version(tensor)
        self._version_counter = tensor.detach()
        self._version_counter.data = empty

    def tensor(self) -> Tensor:
        """The tensor."""
        refuse_changed(self._version_counter, self._expected, self._view.shape)
        if self._memory.storage is None:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._view.shape)} that a layer has saved for its backward is in host "
                "memory (offload=), and is needed before the pipe's own backward: leave offload= out"
            )
        tensor = self._version_counter.detach()
        tensor.data = self._view.on(self._memory.storage, self._version_counter)
        return tensor


class SavedTensors:
    """What autograd saves of one micro-batch: the one place that knows what can be moved.

    Args:
        device: of the stage.

    Example:
        >>> x, saved = torch.ones(3, requires_grad=True), SavedTensors(torch.device("cpu"))
        >>> with saved.saving():
        ...     y = x.exp().tanh().sum()
        >>> sum(memory.storage.nbytes() for memory in saved.moving())
        24
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Weak: what has been saved for a graph that is gone need not move. A memory keeps its storage, and so the key.
        self._memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._empty: dict[torch.dtype, Tensor] = {}

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """1: a context for the layers."""
        outer = torch_private.saved_tensor_hooks()
        if outer is not None:
            yield
            return
        with saved_tensors_hooks(uncompiled(self._pack), _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        storage = movable(tensor, self._device)
        if storage is not None:
            return Saved(tensor, self.memory_of(storage), self.empty(tensor.dtype))
        return packed(tensor)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """A tensor without elements: always the same one, since its making costs as much as the rest of a `Saved`."""
        found = self._empty.get(dtype)
        if found is None:
            found = self._empty[dtype] = torch.empty(0, dtype=dtype, device=self._device)
        return found

    def memory_of(self, storage: torch.UntypedStorage) -> Memory:
        """The memory of a tensor that can be moved, see `movable`."""
        key = torch_private.storage_key(storage)
        found = self._memories.get(key)
        if found is None:
            found = self._memories[key] = Memory(storage)
        return found

    def moving(self) -> list[Memory]:
        """2: the memories that an O moves, when the forward is over: those that nothing but graphs uses.

        Graphs of two micro-batches may share a memory. Each O moves it, and the last one frees it.
        """
        memories = [*self._memories.values()]
        return [each for each in memories if each.storage is not None and torch_private.is_only_use(each.storage)]


def movable(tensor: Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """The storage of a tensor, if memory on this device can stand for the tensor, and other memory can take its place.

    None: it cannot. A parameter, for example, stays.
    """
    if type(tensor) is not Tensor or tensor.device != device or tensor.layout is not torch.strided:
        return None
    if tensor.is_quantized or tensor.is_inference():
        return None
    # Transforms have tensors without memory; and memory that PyTorch has not allocated may lie anywhere.
    storage = torch_private.storage_of(tensor)
    if storage is None or not storage.nbytes() or storage.data_ptr() % torch_private.ALIGNMENT:
        return None
    return storage


def _unpack(saved: Any) -> Tensor:
    return saved.tensor() if isinstance(saved, Saved) else unpacked(saved)


_unpack.may_be_called_twice = True  # type: ignore[attr-defined]


class Offload:
    """What one stage has in host memory, in one mini-batch.

    Args:
        stage: the stage.
        kept: has the inputs of micro-batches that are recomputed.
        graphs: the micro-batches whose graphs are moved; of others the inputs are.
        at_once: how many micro-batches the worker has in host memory at the same time, at most.
        releases: the actions with which the device memory of the worker's latest O is free.

    Attributes:
        graphs: as above.
        ways: by kind of action, the stream that copies; None: there are no streams.
    """

    def __init__(self, stage: Stage, kept: Kept, graphs: Set[int], at_once: int, releases: Set[Action]) -> None:
        self._stage, self._kept, self.graphs, self._at_once = stage, kept, graphs, at_once
        self._releases = releases
        self._host = stage.device.host_memory
        self._saved: dict[int, SavedTensors] = {}
        self._away: dict[int, tuple[Stored, list[Memory], list[tuple[Tensor, MemoryView, Memory]]]] = {}
        self._coming: dict[int, tuple[Stored, torch.Event | None]] = {}
        self.ways: Mapping[str, torch.Stream | None] = {"O": self._host.out, "L": self._host.back}

    def saving(self, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """A context for the layers of a micro-batch whose graph is moved."""
        saved = self._saved[micro_batch] = SavedTensors(self._stage.device.device)
        return saved.saving()

    def store(self, action: Action) -> None:
        """O: starts the copies to the host."""
        micro_batch, device = action[2], self._stage.device.device
        saved = self._saved.pop(micro_batch, None) or SavedTensors(device)
        inputs = [
            (leaf, MemoryView.of(leaf), saved.memory_of(storage))
            for leaf in (self._kept.inputs(micro_batch) if self._stage.index else ())
            if (storage := movable(leaf, device)) is not None
        ]
        for leaf, _, _ in inputs:
            leaf.data = saved.empty(leaf.dtype)
        moving = saved.moving()
        _fill([each for each in inputs if each[2] not in moving])
        stored = self._host.store([each.storage for each in moving if each.storage is not None], self._at_once)
        for memory in moving:
            memory.storage = None
        self._away[micro_batch] = stored, moving, [each for each in inputs if each[2] in moving]

    def fetch(self, action: Action) -> None:
        """L: starts the copies to the device, unless it has them, since a backward ran before (`retain_graph`)."""
        if action in self._releases:
            self._host.release()
        if action[2] not in self._away:
            return
        stored, memories, inputs = self._away.pop(action[2])
        storages, event = self._host.fetch(stored)
        for memory, storage in zip(memories, storages, strict=True):
            memory.storage = storage
        _fill(inputs)
        self._coming[action[2]] = stored, event

    def change_of(self, action: Action) -> int:
        """The bytes by which an O or an L has changed what its micro-batch holds on the device."""
        found = (self._away if action[0] == "O" else self._coming).get(action[2])
        size = 0 if found is None else sum(found[0].sizes)
        return -size if action[0] == "O" else size

    def arrive(self, action: Action) -> None:
        """B, I or R: begins when the copies are there. From now on the buffers may be used again."""
        coming = self._coming.pop(action[2], None)
        if coming is not None:
            self._host.arrive(coming[1])

    def settle(self) -> None:
        """After a run."""
        self._host.settle()

    def clear(self) -> None:
        """Drops everything, after a failure."""
        for each in (self._saved, self._away, self._coming):
            each.clear()


def _fill(inputs: list[tuple[Tensor, MemoryView, Memory]]) -> None:
    """Gives tensors that were emptied their memory again."""
    for leaf, view, memory in inputs:
        assert memory.storage is not None
        leaf.data = view.on(memory.storage, leaf)
