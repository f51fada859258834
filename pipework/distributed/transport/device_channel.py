"""Transfers between the accelerators of two ranks by their own backend, such as NCCL, without the CPU.

Such a backend has no tags: tensors are received in the order in which they are sent, into memory of their size. A wait
makes the current stream wait, not the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipework.torch_private import transfer_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipework.distributed.transport.groups import Group
    from pipework.values.tensor_form import TensorForm


class DeviceChannel:
    """Tensors to and from one other rank."""

    def __init__(self, outgoing: Group, incoming: Group, device: torch.device) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._peer = 1 - outgoing.rank()
        self._device = device

    def connect(self) -> None:
        """Sends and receives a byte, as the other rank does: the first transfer of a group waits for the receiver."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        both = [(self._outgoing, "send"), (self._incoming, "recv")]
        for group, operation in both if self._peer else reversed(both):  # on both sides in the same order
            transfer_together(group, operation, [byte], self._peer).wait()

    def send(self, memories: Sequence[Tensor]) -> Any:
        """Starts to send the tensors of a message, which are not empty; the result has a `wait()`."""
        return transfer_together(self._outgoing, "send", memories, self._peer)

    def receive(self, forms: Sequence[TensorForm]) -> list[Tensor]:
        """The tensors of the next message, which are of these forms."""
        rooms = [form.room(self._device) for form in forms]
        if full := [room for room in rooms if room.numel()]:
            transfer_together(self._incoming, "recv", full, self._peer).wait()
        return [form.tensor(room) for form, room in zip(forms, rooms, strict=True)]
