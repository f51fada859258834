"""A channel between two ranks, in both directions: messages in order, with a header if their form has changed.

A message is three numbers, and its tensors, each by itself, directly from and into their memory:

    sender                                              receiver
    numbers: which message, bytes of a header, ------> posted ahead
             how many messages have arrived
    tensors                                         --> posted ahead, in the form of the last message to this address
    or, if the form is another one:
    a byte in place of each tensor expected         --> ends its receive
    the header, then the tensors                    --> buffers in the forms of the header

gloo accepts a message that is shorter than its buffer without an error, and ends the process at a longer one. So a
tensor is received only if both sides know its size. The byte in place of a tensor is shorter than its buffer on
purpose.

A rank acknowledges what has arrived in the numbers that it sends: only then does the other one release its memory.

Tensors on an accelerator go directly to the other one if there is a `device_channel`: in the order in which they are
sent, and received when their sizes are known. Else they are copied to the CPU and back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipework.distributed.transport.groups import break_group, transferring
from pipework.distributed.transport.header import Header, decode, describe, encode, may_be_changed
from pipework.torch_private import require, transfer_together
from pipework.values import tensor_form
from pipework.values.dtensor import local_part
from pipework.values.shared_memory import apart, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from pipework.distributed.transport.groups import Group
    from pipework.runtime.transport import Address, Message
    from pipework.values.tensor_form import TensorForm


_NUMBERS = 3  # at the beginning of a message


class _Posted(NamedTuple):
    """A message whose receive has begun.

    Attributes:
        number: of the message.
        expected: its header if nothing has changed.
        numbers: where those of the message arrive.
        buffers: for its tensors.
        works: end when the numbers, and what is in the buffers, have arrived.
    """

    number: int
    expected: Header
    numbers: Tensor
    buffers: tuple[Tensor | None, ...]
    works: list[Any]


class _Kept(NamedTuple):
    """A message that may not have arrived yet.

    Attributes:
        number: of the message.
        works: end when it is sent.
        parts: the memory that is sent.
    """

    number: int
    works: list[Any]
    parts: list[Tensor]


class DeviceChannel:
    """Tensors to and from the accelerator of one other rank by its own backend, such as NCCL, without the CPU.

    Such a backend has no tags: tensors are received in the order in which they are sent, into memory of their size. A
    wait makes the current stream wait, not the program.
    """

    def __init__(self, outgoing: Group, incoming: Group, device: torch.device) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._peer = 1 - outgoing.rank()
        self._device = device

    def connect(self) -> None:
        """Sends and receives a byte, as the other rank does: the first transfer of a group waits for the receiver."""
        require(self._outgoing, "_start_coalescing _end_coalescing")  # of PyTorch's, which no later transfer looks for
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


@dataclass(eq=False)
class Channel:
    """Messages between this rank and another one; see the module.

    Every message has an address, which must be received as often as it is sent. Sending never waits for the receiver.

    Attributes:
        rank: the other rank.
        outgoing: a group of the two, for sending.
        incoming: another group of the two, for receiving: a backend may execute all transfers of one group in order.
        device: of this rank.
        device_channel: for tensors on accelerators; None: they go through the CPU.
        mesh: of the pipe, for DTensors; None: none are received.
    """

    rank: int
    outgoing: Group
    incoming: Group
    device: torch.device
    device_channel: DeviceChannel | None = None
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        self._peer = 1 - self.outgoing.rank()
        # The header of the last message to each address, which the other side knows as well; at first it is empty.
        self._nothing = Header((), None)
        self._sent_headers: dict[Address, Header] = {}
        self._received_headers: dict[Address, Header] = {}
        self._sent = 0
        self._kept: deque[_Kept] = deque()
        self._posted: dict[Address, _Posted] = {}
        self._expected = 0
        # Messages that had to be received before `take` asked for them.
        self._early: dict[Address, tuple[Header, tuple[Tensor | None, ...]]] = {}

    def send(self, address: Address, tensors: Sequence[Tensor | None], around: Any) -> None:
        """Sends a message, and returns at once.

        Raises:
            TypeError: a plain value cannot be sent.
            LostConnectionError: the other rank is gone.
        """
        expected = self._sent_headers.get(address, self._nothing)
        tensors, shared = together(tuple(tensors))
        header = describe(tensors, around, shared)
        encoded, parts = b"", self._memories(tensors)
        if header != expected:
            encoded = encode(header)
            # A copy: the sender may change the values around the tensors afterwards.
            self._sent_headers[address] = decode(encoded)
            instead = [_bytes(1) for each in expected.forms if self._is_posted(each)]
            parts = [*instead, torch.frombuffer(bytearray(encoded), dtype=torch.uint8), *parts]
        number, self._sent = self._sent, self._sent + 1
        numbers = torch.tensor([number, len(encoded), self._arrived], device="cpu")
        with transferring(self.rank):
            works = [self.outgoing.send([numbers], self._peer, 2 * number)]
            works += [self.outgoing.send([part], self._peer, 2 * number + 1) for part in parts]
            if self.device_channel is not None:
                memories = [
                    tensor_form.memory_of(t) for t in tensors if t is not None and tensor_form.lies_on_accelerator(t)
                ]
                if full := [memory for memory in memories if memory.numel()]:
                    works.append(self.device_channel.send(full))
                parts += memories
        self._kept.append(_Kept(number, works, [numbers, *parts]))

    def post(self, address: Address) -> None:
        """Begins to receive the next message to this address. Posts have the order in which the other rank sends."""
        number, self._expected = self._expected, self._expected + 1
        expected = self._received_headers.get(address, self._nothing)
        numbers, buffers = torch.empty(_NUMBERS, dtype=torch.int64, device="cpu"), self._buffers(expected)
        with transferring(self.rank):
            works = [self.incoming.recv([numbers], self._peer, 2 * number), *self._receive(number, buffers)]
        self._posted[address] = _Posted(number, expected, numbers, buffers, works)

    def take(self, address: Address) -> Message:
        """Waits for a message that was posted.

        Raises:
            LostConnectionError: the other rank is gone.
            RuntimeError: another message has arrived.
        """
        if self.device_channel is not None:
            for earlier in list(self._posted):  # in the order in which they were sent
                if earlier == address or address in self._early:
                    break
                self._early[earlier] = self._receive_message(earlier)
        header, tensors = self._early.pop(address) if address in self._early else self._receive_message(address)
        ready = [self._ready(tensor, each) for tensor, each in zip(tensors, header.forms, strict=True)]
        return apart(tuple(ready), header.parts), header.around

    def receive(self, address: Address) -> Message:
        """Posts the next message to this address, and waits for it."""
        self.post(address)
        return self.take(address)

    def _receive_message(self, address: Address) -> tuple[Header, tuple[Tensor | None, ...]]:
        """Waits for a message, and returns its header and its tensors."""
        number, header, numbers, buffers, works = self._posted.pop(address)
        with transferring(self.rank):
            for work in works:
                work.wait()
        arrived_number, length, acknowledged = numbers.tolist()
        if arrived_number != number:
            raise RuntimeError(
                f"message {arrived_number} of rank {self.rank} arrived instead of message {number}, for {address}"
            )
        if length:
            data = _bytes(length)
            with transferring(self.rank):
                self.incoming.recv([data], self._peer, 2 * number + 1).wait()
            encoded = data.numpy().tobytes()
            header = decode(encoded)
            # A copy: the layers may change the values around the tensors that they get.
            self._received_headers[address] = decode(encoded)
            buffers = self._buffers(header)
            with transferring(self.rank):
                for work in self._receive(number, buffers):
                    work.wait()
        elif may_be_changed(header.around):
            header = decode(encode(header))
        tensors = header.tensors(buffers)
        if self.device_channel is not None:
            tensors = _with_device_tensors(self.device_channel, tensors, header)
        self._release(acknowledged)
        return header, tensors

    def _ready(self, tensor: Tensor | None, form: tensor_form.TensorForm | None) -> Tensor | None:
        """A received tensor on its device, requiring a gradient if it did so there."""
        if tensor is None or form is None:
            return None
        if form.on_accelerator and self.device_channel is None:
            tensor = tensor.to(self.device)
        if form.placed is not None:
            tensor = form.placed.whole(tensor, self.mesh)
        return tensor.requires_grad_() if form.requires_grad else tensor

    def flush(self) -> None:
        """Waits until everything has been sent."""
        self._release(self._sent)

    def abort(self) -> None:
        """Ends all transfers, also those that other threads wait for; the channel cannot be used any more."""
        break_group(self.outgoing)
        break_group(self.incoming)

    def forget(self) -> None:
        """After an abort, when no thread waits any more: drops all tensors of unfinished transfers."""
        self._kept.clear()
        self._posted.clear()
        self._early.clear()

    def _memories(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The memory of tensors that go through the CPU."""
        present = [part for tensor in tensors if tensor is not None and (part := local_part(tensor)).numel()]
        if self.device_channel is not None:
            present = [tensor for tensor in present if not tensor_form.lies_on_accelerator(tensor)]
        return [tensor_form.memory_of(tensor).cpu() for tensor in present]

    def _buffers(self, header: Header) -> tuple[Tensor | None, ...]:
        """Memory for tensors that come through the CPU."""
        return tuple([each.room() if each is not None and self._through_cpu(each) else None for each in header.forms])

    def _through_cpu(self, form: tensor_form.TensorForm) -> bool:
        return self.device_channel is None or not form.on_accelerator

    def _is_posted(self, form: tensor_form.TensorForm | None) -> bool:
        """Whether the receive of such a tensor begins before the numbers of its message have arrived."""
        return form is not None and 0 not in form.shape and self._through_cpu(form)

    def _receive(self, number: int, buffers: Sequence[Tensor | None]) -> list[Any]:
        return [
            self.incoming.recv([buffer], self._peer, 2 * number + 1)
            for buffer in buffers
            if buffer is not None and buffer.numel()
        ]

    def _release(self, acknowledged: int) -> None:
        """Drops the messages before this number, which the other rank has received."""
        while self._kept and self._kept[0].number < acknowledged:
            with transferring(self.rank):
                for work in self._kept[0].works:
                    work.wait()
            self._kept.popleft()

    @property
    def _arrived(self) -> int:
        """All messages before this number have arrived."""
        return next((posted.number for posted in self._posted.values()), self._expected)


def _with_device_tensors(
    device_channel: DeviceChannel, tensors: tuple[Tensor | None, ...], header: Header
) -> tuple[Tensor | None, ...]:
    """The tensors of a message, with those that come directly from the other accelerator."""
    forms = [each if each is not None and each.on_accelerator else None for each in header.forms]
    received = iter(device_channel.receive([each for each in forms if each is not None]))
    return tuple([tensor if each is None else next(received) for tensor, each in zip(tensors, forms, strict=True)])


def _bytes(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device="cpu")
