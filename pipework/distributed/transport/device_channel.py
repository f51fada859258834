"""Transfers between the accelerators of two ranks by their own backend, such as NCCL, without the CPU.

Such a backend has no tags: tensors are received in the order in which they are sent, into memory of their size. A wait
makes the current stream wait, not the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pipework.distributed.transport.channel import Group
    from pipework.values.tensor_form import TensorForm


class DeviceChannel:
    """Tensors to and from one other rank."""

    def __init__(self, outgoing: Group, incoming: Group, device: torch.device) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._peer = 1 - outgoing.rank()
        self._device = device

    def send(self, memory: Tensor) -> Any:
        """Starts to send; the result has a `wait()`."""
        return self._outgoing.send([memory], self._peer, 0)

    def receive(self, form: TensorForm) -> Tensor:
        """The next tensor, which is of this form."""
        room = form.room(self._device)
        if room.numel():
            self._incoming.recv([room], self._peer, 0).wait()
        return form.tensor(room)

    def abort(self) -> None:
        """Ends all transfers."""
        self._outgoing.abort()
        self._incoming.abort()
