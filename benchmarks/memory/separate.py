"""Workers that share nothing, on one CPU: what crosses a boundary is copied into the receiver's memory.

CPU workers hand tensors over by reference, so the memory of a value that two stages keep is there once and belongs to
none of them. On devices of their own each has its copy; only then has a stage a number of bytes that is its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from benchmarks.memory.live import LiveStorages
from pipework.pipe import Pipe


class CopyingLink:
    """The way to another worker, as between two accelerators: the copy starts when the value departs."""

    def __init__(self, storages: LiveStorages, receiver: int) -> None:
        self._storages = storages
        self._receiver = receiver

    def depart(self, tensors: tuple[Tensor | None, ...]) -> tuple[tuple[Tensor | None, ...], None]:
        """See `pipework.runtime.device.Link`."""
        copies = (None if tensor is None else self._storages.copied(tensor, self._receiver) for tensor in tensors)
        return tuple(copies), None

    def arrive(self, tensors: tuple[Tensor | None, ...], event: None) -> None:
        """See `pipework.runtime.device.Link`."""


def with_separate_memories(pipe: Pipe, storages: LiveStorages) -> Pipe:
    """Makes the pipe's CPU workers behave as if each had memory of its own, and tells the tracker whose is what."""
    workers = range(len(pipe.partitions))
    for worker, partition in enumerate(pipe.partitions):
        storages.follow(partition, worker)
    house: Any = pipe._house_in_use()
    links = {(a, b): CopyingLink(storages, b) if a != b else None for a in workers for b in workers}
    pipe._house = dataclasses.replace(house, links=links)
    for stage in house.stages:
        stage.shares_output = False  # as open_house says of stages on different devices
    return pipe
