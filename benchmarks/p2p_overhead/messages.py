"""Messages to and fro between two processes, with nothing computed: through pipework's channel, and as PyTorch does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from benchmarks.two_processes import Part
from pipework import Mesh
from pipework.distributed.transport.channel import Channel
from pipework.distributed.transport.groups import group_of, network_devices

ROUND_TRIPS = 50  # of a run, each of two messages
CHANNEL, ISEND, BATCHED = "pipework's channel", "isend and irecv", "batch_isend_irecv"


class ThroughChannel:
    """Says of what form the tensor is, receives into memory of that form, and acknowledges."""

    def __init__(self, mesh: Mesh, tensor: Tensor) -> None:
        store = PrefixStore(f"messages of {tensor.numel()}", mesh.store)
        devices = network_devices()
        up, down = (group_of(store, name, (0, 1), mesh.worker, devices) for name in ("up", "down"))
        self._first = mesh.worker == 0
        self._channel = Channel(1 - mesh.worker, *((up, down) if self._first else (down, up)), mesh.device)
        self._tensor = tensor

    def run(self) -> None:
        """See `Part`."""
        channel = self._channel
        for number in range(ROUND_TRIPS):
            address = ("F", 0, number)
            channel.post(address)
            if self._first:
                channel.send(address, (self._tensor,), None)
                channel.take(address)
            else:
                tensors, around = channel.take(address)
                channel.send(address, tensors, around)
        channel.flush()

    def clear(self) -> None:
        """See `Part`: there is nothing to clear."""

    def gradients(self) -> list[tuple[int, Tensor]]:
        """See `Part`: nothing is computed."""
        return []


class ThroughPyTorch:
    """Receives into memory whose form is known before, and waits for what was sent when something has come back."""

    def __init__(self, mesh: Mesh, tensor: Tensor, *, batched: bool) -> None:
        self._first = mesh.worker == 0
        self._other = 1 - mesh.worker
        self._tensor = tensor
        self._batched = batched

    def run(self) -> None:
        """See `Part`."""
        for _ in range(ROUND_TRIPS):
            buffer = torch.empty_like(self._tensor)
            if self._first:
                received = self._start(dist.irecv, buffer)
                sent = self._start(dist.isend, self._tensor)
                received.wait()
            else:
                self._start(dist.irecv, buffer).wait()
                sent = self._start(dist.isend, buffer)
            sent.wait()

    def _start(self, operation: Any, tensor: Tensor) -> Any:
        if not self._batched:
            return operation(tensor, self._other)
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, self._other)])[0]

    def clear(self) -> None:
        """See `Part`: there is nothing to clear."""

    def gradients(self) -> list[tuple[int, Tensor]]:
        """See `Part`: nothing is computed."""
        return []


def parts(mesh: Mesh, numbers: int) -> Mapping[str, Part]:
    """All ways to send so many numbers."""
    tensor = torch.randn(numbers)
    return {
        CHANNEL: ThroughChannel(mesh, tensor),
        ISEND: ThroughPyTorch(mesh, tensor, batched=False),
        BATCHED: ThroughPyTorch(mesh, tensor, batched=True),
    }
