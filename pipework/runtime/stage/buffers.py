"""Buffers that layers change while they run (batch norm's statistics), kept from changing in a recomputation.

A checkpointed micro-batch runs twice. The first pass changes the buffers. The second must read the values that the
first has read, and must not change them again. So the buffers are cloned before the first pass. During the second, the
modules hold the clones, which are then dropped. Training flags are kept too, since the user may evaluate between
forward and backward.

All small buffers are cloned, and large ones if they are known to change: a clone of a constant mask for every
micro-batch would cost the memory that checkpointing saves. The stage's first checkpointed pass compares values to learn
which buffers change, since batch norm's kernels do not increment a tensor's version.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn


SMALL = 64 * 1024  # bytes; cloning so much costs no more than a few operators


class Slot(NamedTuple):
    """The place of a buffer in a module: a dictionary and a name."""

    buffers: dict[str, Tensor | None]
    name: str

    @property
    def identity(self) -> tuple[int, str]:
        """Tells slots apart."""
        return id(self.buffers), self.name

    @property
    def mark(self) -> tuple[int, int]:
        """Differs after most changes of the buffer."""
        tensor = self.buffers.get(self.name)
        return id(tensor), -1 if tensor is None else torch_private.version(tensor)


class Snapshot(NamedTuple):
    """The buffers that may change, and the training flags, as they were before a first pass."""

    clones: list[tuple[Slot, Tensor | None]]
    marks: list[tuple[Slot, tuple[int, int]]]  # of the others
    created: list[Slot]  # by the first pass: they were not there before
    training: list[tuple[nn.Module, bool]]

    @property
    def tensors(self) -> list[Tensor]:
        """The clones."""
        return [clone for _, clone in self.clones if clone is not None]

    @contextlib.contextmanager
    def standing_in(self, *, again: bool) -> Iterator[None]:
        """Inside, the modules hold copies of the buffers from before the first pass.

        Args:
            again: whether the snapshot is used once more.
        """
        present = [(slot, slot.buffers.get(slot.name)) for slot in [*(slot for slot, _ in self.clones), *self.created]]
        changed = [(module, training) for module, training in self.training if module.training != training]
        for slot, clone in self.clones:
            slot.buffers[slot.name] = clone.clone() if again and clone is not None else clone
        for slot in self.created:
            slot.buffers.pop(slot.name, None)
        for module, training in changed:
            module.training = training
        try:
            yield
        finally:
            for module, training in changed:
                module.training = not training
            for slot, tensor in present:
                slot.buffers[slot.name] = tensor


class MutableBuffers:
    """The buffers of one stage, and which of the large ones change.

    Args:
        modules: the stage's layers, as they are run.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._mutable: set[tuple[int, str]] = set()  # the large ones, by slot
        self._compared = False

    def snapshot(self) -> Snapshot:
        """Clones the buffers that may change; called before a first pass."""
        clones: list[tuple[Slot, Tensor | None]] = []
        marks = []
        for slot in self._slots():
            tensor = slot.buffers[slot.name]
            if tensor is None:
                clones.append((slot, None))
            elif not self._compared or tensor.nbytes <= SMALL or slot.identity in self._mutable:
                clones.append((slot, tensor.clone()))
            else:
                marks.append((slot, slot.mark))
        training = [(module, module.training) for layer in self._modules for module in layer.modules()]
        return Snapshot(clones, marks, [], training)

    def learn(self, before: Snapshot) -> Snapshot:
        """After a first pass: remembers which large buffers it has changed. Returns the snapshot for the second pass.

        Raises:
            RuntimeError: a large buffer has changed that did not change in the first checkpointed pass.
        """
        for slot, mark in before.marks:
            if slot.mark != mark:
                raise RuntimeError(
                    f"the large buffer {slot.name!r} ({_size(slot)}) did not change when its layer was first "
                    "checkpointed, and changes now: its values for the recomputation were not kept. Let it change from "
                    "the first mini-batch on, or use checkpoint='never'"
                )
        known = {slot.identity for slot, _ in (*before.clones, *before.marks)}
        created = [slot for slot in self._slots() if slot.identity not in known]
        if self._compared:
            return Snapshot(before.clones, [], created, before.training)
        self._compared = True
        kept = []
        for slot, clone in before.clones:
            now = slot.buffers.get(slot.name)
            if clone is not None and (now is None or not _same(clone, now)):
                self._mutable.add(slot.identity)
            elif clone is not None and clone.nbytes > SMALL:
                continue
            kept.append((slot, clone))
        return Snapshot(kept, [], created, before.training)

    def _slots(self) -> Iterator[Slot]:
        """The slots of all present buffers, each once."""
        seen: set[int] = set()
        for layer in self._modules:
            for module in layer.modules():
                if module._buffers and id(module) not in seen:
                    seen.add(id(module))
                    yield from [Slot(module._buffers, name) for name in module._buffers]


def _same(before: Tensor, now: Tensor) -> bool:
    """Whether a buffer is unchanged; False for one without data."""
    return before.device.type != "meta" and torch.equal(before, now)


def _size(slot: Slot) -> str:
    tensor = slot.buffers.get(slot.name)
    return "removed" if tensor is None else f"{tensor.nbytes:,} bytes"
