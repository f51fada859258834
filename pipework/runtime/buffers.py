"""Buffers that layers change while they run (batch norm's statistics), and how a recomputation leaves them alone.

A checkpointed micro-batch runs twice. Its first pass changes the buffers, as it should. The second must find them as
the first did, or it would compute something else, and it must not change them again. So clones are taken before the
first pass, stand in the modules' slots during the second, and are thrown away.

Which buffers change is learned, because cloning a large constant mask for every micro-batch would cost what
checkpointing saves. A stage's first checkpointed pass compares all values; batch norm's kernels do not even raise a
tensor's version.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn


class Slot(NamedTuple):
    """A place where a module keeps a buffer."""

    buffers: dict[str, Tensor | None]
    name: str

    @property
    def mark(self) -> tuple[int, int]:
        """Differs after most changes of the buffer."""
        tensor = self.buffers.get(self.name)
        return id(tensor), -1 if tensor is None else tensor._version


class Snapshot(NamedTuple):
    """The mutable buffers as they were before a first pass."""

    clones: list[tuple[Slot, Tensor]]
    marks: list[tuple[Slot, tuple[int, int]]]

    @contextlib.contextmanager
    def standing_in(self, *, again: bool) -> Iterator[None]:
        """For the time of the context, the modules find copies of what was in their slots before the first pass.

        Args:
            again: whether the same snapshot will be needed once more.
        """
        present = [(slot, slot.buffers.get(slot.name)) for slot, _ in self.clones]
        for slot, clone in self.clones:
            slot.buffers[slot.name] = clone.clone() if again else clone
        try:
            yield
        finally:
            for slot, tensor in present:
                slot.buffers[slot.name] = tensor


class MutableBuffers:
    """The buffers of one stage, and what is known of them.

    Args:
        modules: the stage's layers, as they are run.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners = {id(module): module for layer in modules for module in layer.modules()}.values()
        slots = [
            (isinstance(owner, _NormBase), Slot(owner._buffers, name)) for owner in owners for name in owner._buffers
        ]
        self._mutable = [slot for changes, slot in slots if changes]
        self._unknown = [slot for changes, slot in slots if not changes]
        self._compared = not self._unknown

    def snapshot(self) -> Snapshot:
        """To be taken before a first pass."""
        slots = self._mutable if self._compared else self._mutable + self._unknown
        clones = [(slot, tensor.clone()) for slot in slots if (tensor := slot.buffers.get(slot.name)) is not None]
        return Snapshot(clones, [(slot, slot.mark) for slot in self._unknown])

    def learn(self, before: Snapshot) -> Snapshot:
        """After a first pass: remembers which buffers it has changed. Returns the snapshot for the second pass."""
        changed = [slot for slot, mark in before.marks if slot.mark != mark]
        clones = before.clones
        if not self._compared:
            self._compared = True
            unequal = {
                id(slot)
                for slot, clone in clones
                if (now := slot.buffers.get(slot.name)) is None or not torch.equal(clone, now)
            }
            changed = [slot for slot, mark in before.marks if slot.mark != mark or id(slot) in unequal]
            mutable = {id(slot) for slot in self._mutable + changed}
            clones = [(slot, clone) for slot, clone in clones if id(slot) in mutable]
        elif changed:
            # Changed for the first time now: too late to know what was there, but it will not be counted twice.
            clones = clones + [
                (slot, now.clone()) for slot in changed if (now := slot.buffers.get(slot.name)) is not None
            ]
        if changed:
            known = {id(slot) for slot in changed}
            self._mutable += changed
            self._unknown = [slot for slot in self._unknown if id(slot) not in known]
        return Snapshot(clones, [])
