"""The host memory to which a worker's activations go for a while, and the two ways between it and the device.

    compute   F0     F1     F2     B0          the stream on which the worker computes
    out          O0     O1                     copies to the host
    back                       L0              copies to the device

    1  `out` waits for compute: the F has written what is copied
    2  compute waits for `out`: from then on, and not before, its next kernels may use the device memory of the O
    3  `back` waits for compute: the device memory of the L may be in use by earlier kernels
    4  compute waits for `back`: the B reads what was copied

The host waits for nothing. A micro-batch's buffers are free after 4, so 1 orders their next use after all earlier ones.

Buffers are kept for later micro-batches and mini-batches, as many as were in use at once. Their sizes are powers of
two, to which PyTorch rounds pinned memory in any case, up to a limit beyond which several buffers follow each other. So
micro-batches of other sizes use the same ones.

On the CPU there are no streams, and the buffers are ordinary memory; on the meta device they have no data. All else is
the same.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import torch

from pipework.runtime.free_memory import HostAccount

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

LARGEST: Final = 2**26
"""Bytes of the largest buffer."""

ALIGNMENT: Final = 512
"""Storages begin at multiples of so many bytes of a buffer."""


class HostMemory:
    """The buffers and ways of one worker. One thread uses them at a time.

    Args:
        device: of the worker.
        compute: the stream on which the worker computes; None: the device is the CPU.
        account: of all workers of the process.

    Attributes:
        out: the stream of copies to the host; None: there are no streams.
        back: that of copies to the device.
        asked: whether there was an O that found enough memory, also for nothing.
    """

    def __init__(self, device: torch.device, compute: torch.Stream | None, account: HostAccount) -> None:
        self._device = device
        self._compute = compute
        self._account, self._name = account, id(self)  # the account would keep an object
        self._host = "meta" if device.type == "meta" else "cpu"
        self.out = None if compute is None else torch.Stream(device)
        self.back = None if compute is None else torch.Stream(device)
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._leaving: tuple[Tensor, ...] = ()
        self.asked = False

    @property
    def leaving(self) -> int:
        """The bytes of the device memory that 2 has not freed yet."""
        return sum(each.nbytes for each in self._leaving)

    @property
    def reserved(self) -> int:
        """The bytes of all free buffers; while no micro-batch is away, of all."""
        return sum(size * len(free) for size, free in self._free.items())

    def store(self, memories: Sequence[torch.UntypedStorage], at_once: int = 1) -> Stored:
        """O: starts the copies of device memories to the host. The memories stay until `release`.

        Args:
            memories: of one micro-batch.
            at_once: how many micro-batches will be on the host at the same time.

        Raises:
            MemoryError: it is the first O, and the host has too little for as many like this one, or for the workers
                together.
        """
        self.release()
        sources = tuple(map(self._bytes_of, memories))
        sizes = [each.nbytes for each in sources]
        if not self._free and self._host == "cpu":
            self._account.claim(self._name, at_once * sum(buffer_sizes(sizes)))
        stored = Stored(self, sizes)
        self._leaving, self.asked = sources, True
        if self._compute is not None and self.out is not None:
            self.out.wait_event(self._compute.record_event())  # 1
        with self.out or contextlib.nullcontext():
            for source, piece in stored.pieces(sources):
                piece.copy_(source, non_blocking=True)
        return stored

    def release(self) -> None:
        """Frees the device memory of the latest O, which is the last thing on its way."""
        if self._compute is not None and self.out is not None and self._leaving:
            self._compute.wait_stream(self.out)  # 2
        self._leaving = ()

    def fetch(self, stored: Stored) -> tuple[list[torch.UntypedStorage], torch.Event | None]:
        """L: starts the copies into new device memories. Returns these, and the event for `arrive`."""
        targets = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in stored.sizes]
        if self._compute is not None and self.back is not None:
            self.back.wait_event(self._compute.record_event())  # 3
        with self.back or contextlib.nullcontext():
            for target, piece in stored.pieces(targets):
                target.copy_(piece, non_blocking=True)
        return [each.untyped_storage() for each in targets], None if self.back is None else self.back.record_event()

    def arrive(self, event: torch.Event | None) -> None:
        """Before the B: the worker's next kernels may read what was loaded."""
        if self._compute is not None and event is not None:
            self._compute.wait_event(event)  # 4

    def settle(self) -> None:
        """After a run, also one that has failed: device memory of copies may be used again."""
        for way in (self.out, self.back):
            if self._compute is not None and way is not None:
                self._compute.wait_stream(way)
        self._leaving = ()

    def take(self, size: int) -> Tensor:
        """A buffer; `give` brings it back."""
        free = self._free[size]
        if free:
            return free.pop()
        if self._host == "cpu":
            self._account.took(self._name, size)
        return torch.empty(size, dtype=torch.uint8, device=self._host, pin_memory=self._compute is not None)

    def give(self, buffers: Sequence[Tensor]) -> None:
        """See `take`; any thread may call it."""
        for buffer in buffers:
            self._free[buffer.nbytes].append(buffer)

    def _bytes_of(self, memory: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(memory)


class Stored:
    """What one O has stored: it has its buffers until nothing refers to it.

    Args:
        host: has the buffers.
        sizes: the bytes of each device memory.

    Attributes:
        sizes: as above.

    Example:
        >>> host = HostMemory(torch.device("cpu"), None, HostAccount())
        >>> stored = host.store([torch.arange(3).untyped_storage()])
        >>> memories, _ = host.fetch(stored)
        >>> torch.empty(0, dtype=torch.int64).set_(memories[0]), host.reserved
        (tensor([0, 1, 2]), 0)
        >>> del stored
        >>> host.reserved
        512
    """

    def __init__(self, host: HostMemory, sizes: list[int]) -> None:
        self._host, self.sizes = host, sizes
        self._buffers: list[Tensor] = []
        self._buffers.extend(map(host.take, buffer_sizes(sizes)))  # `__del__` gives back also what came before an error

    def __del__(self) -> None:
        self._host.give(self._buffers)

    def pieces(self, memories: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The memories, as bytes, beside their places in the buffers; a memory may go over several buffers."""
        buffers = iter(self._buffers)
        room = next(buffers, None)
        for memory in memories:
            while memory.nbytes and room is not None:
                size = min(memory.nbytes, room.nbytes)
                yield memory[:size], room[:size]
                memory, room = memory[size:], room[_rounded(size) :]
                if not room.nbytes:
                    room = next(buffers, None)


def buffer_sizes(sizes: Sequence[int]) -> list[int]:
    """The buffers for memories of these sizes.

    Example:
        >>> buffer_sizes([600, 12])
        [2048]
    """
    left, found = sum(map(_rounded, sizes)), []
    while left > 0:
        found.append(min(LARGEST, 1 << (left - 1).bit_length()))
        left -= found[-1]
    return found


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
