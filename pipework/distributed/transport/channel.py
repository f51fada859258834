"""A channel between two ranks, in both directions: messages in order, described if their form has changed.

A message is a packet with four numbers, and with its tensors if they are small. Larger ones follow, each by itself,
directly from and into their memory:

    sender                                             receiver
    packet: number, what changed, what has arrived --> packet: posted ahead, with the tensors it expects
    large tensors                                  --> buffers in the form of the last message to the same address
    or, if the form is another one:
    the four numbers alone, and a byte for each large tensor that was expected, which ends its receive
    the description, then the tensors              --> buffers in the form that is described

gloo accepts a message that is shorter than its buffer without an error, and ends the process at a longer one. So a
message is received only if both sides know its size. The numbers alone, and the byte for a tensor, are shorter than
their buffers on purpose.

A rank acknowledges what has arrived in the packets that it sends: only then does the other one release its memory.

Tensors on an accelerator go directly to the other one if there is a `device_channel`: in the order in which they are
sent, and received when their sizes are known. Else they are copied to the CPU and back.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from pipework.distributed.transport import header
from pipework.distributed.transport.groups import LostConnectionError, break_group
from pipework.distributed.transport.packet import Packet, Packets, fits_in_packet
from pipework.torch_private import require, transfer_together
from pipework.values import tensor_form
from pipework.values.dtensor import local_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from pipework.distributed.transport.groups import Group
    from pipework.runtime.transport import Address, Message
    from pipework.values.tensor_form import TensorForm


class _Expected(NamedTuple):
    """The form of the last message to an address, which both sides know, and expect of the next one.

    Attributes:
        form: of the message.
        packets: for such messages.
        packed: whether the tensors are in the packet, too.
    """

    form: header.Description
    packets: Packets
    packed: bool


class _Posted(NamedTuple):
    """A message whose receive has begun.

    Attributes:
        number: of the message.
        expected: its form if nothing has changed.
        packet: where it arrives.
        work: ends when the packet has arrived.
        buffers: for tensors that are not in the packet.
        works: end when these have arrived.
    """

    number: int
    expected: _Expected
    packet: Packet
    work: Any
    buffers: tuple[Tensor | None, ...]
    works: list[Any]


class _Kept(NamedTuple):
    """A message that may not have arrived yet.

    Attributes:
        number: of the message.
        works: end when it is sent.
        packet: of it.
        packets: to which the packet is given back.
        parts: all other memory that was sent.
    """

    number: int
    works: list[Any]
    packet: Packet
    packets: Packets
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


class Channel:
    """Messages between this rank and another one; see the module.

    Every message has an address, which must be received as often as it is sent. Sending never waits for the receiver.

    Args:
        rank: the other rank.
        outgoing: a group of the two, for sending.
        incoming: another group of the two, for receiving: a backend may execute all transfers of one group in order.
        device: of this rank.
        device_channel: for tensors on accelerators; None: they go through the CPU.
        mesh: of the pipe, for DTensors; None: none are received.
    """

    def __init__(
        self,
        rank: int,
        outgoing: Group,
        incoming: Group,
        device: torch.device | None = None,
        device_channel: DeviceChannel | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._rank = rank
        self._outgoing = outgoing
        self._incoming = incoming
        self._peer = 1 - outgoing.rank()
        self._device = device
        self._device_channel = device_channel
        self._mesh = mesh
        # The first message to an address is expected to be empty, so that its packet is the numbers alone.
        self._nothing = _Expected(header.Description((), None), Packets(()), packed=True)
        self._packets: WeakValueDictionary[Any, Packets] = WeakValueDictionary()  # by the forms of the tensors in them
        # The form of the last message to each address, which the other side knows as well.
        self._sent_forms: dict[Address, _Expected] = {}
        self._received_forms: dict[Address, _Expected] = {}
        self._sent = 0
        self._kept: deque[_Kept] = deque()
        self._posted: dict[Address, _Posted] = {}
        self._expected = 0
        self._arrived = 0  # all messages before this number
        self._arrived_early: set[int] = set()
        # Messages that had to be received before `take` asked for them.
        self._early: dict[Address, tuple[header.Description, tuple[Tensor | None, ...]]] = {}

    def send(self, address: Address, tensors: Sequence[Tensor | None], around: Any) -> None:
        """Sends a message, and returns at once.

        Raises:
            TypeError: a plain value cannot be sent.
            LostConnectionError: the other rank is gone.
        """
        expected = self._sent_forms.get(address, self._nothing)
        description, parts = b"", []
        if expected.form.fits(tensors, around):
            packets = expected.packets
            packet = packets.get()
            if expected.packed:
                packet.put(tensors)
            else:
                parts = self._memories(tensors)
        else:
            form = header.describe(tensors, around)
            description = header.encode(form)
            # A copy: the sender may change the values around the tensors afterwards.
            self._sent_forms[address] = self._expect(header.decode(description))
            packets = self._nothing.packets
            packet = packets.get()
            if not expected.packed:
                parts = [torch.zeros(1, dtype=torch.uint8) for each in expected.form.forms if self._is_posted(each)]
            parts += [torch.frombuffer(bytearray(description), dtype=torch.uint8), *self._memories(tensors)]
        number, self._sent = self._sent, self._sent + 1
        packet.numbers[:] = [number, len(description), self._arrived, 0]
        try:
            works = [self._outgoing.send([packet.memory], self._peer, 2 * number)]
            works += [self._outgoing.send([part], self._peer, 2 * number + 1) for part in parts]
            if self._device_channel is not None:
                memories = [
                    tensor_form.memory_of(t) for t in tensors if t is not None and tensor_form.lies_on_accelerator(t)
                ]
                if full := [memory for memory in memories if memory.numel()]:
                    works.append(self._device_channel.send(full))
                parts += memories
        except RuntimeError as error:
            raise LostConnectionError(self._rank) from error
        self._kept.append(_Kept(number, works, packet, packets, parts))

    def post(self, address: Address) -> None:
        """Begins to receive the next message to this address. Posts have the order in which the other rank sends."""
        number, self._expected = self._expected, self._expected + 1
        expected = self._received_forms.get(address, self._nothing)
        packet = expected.packets.get()
        buffers = () if expected.packed else self._buffers(expected.form)
        try:
            work = self._incoming.recv([packet.memory], self._peer, 2 * number)
            works = self._receive(number, buffers)
        except RuntimeError as error:
            raise LostConnectionError(self._rank) from error
        self._posted[address] = _Posted(number, expected, packet, work, buffers, works)

    def take(self, address: Address) -> Message:
        """Waits for a message that was posted.

        Raises:
            LostConnectionError: the other rank is gone.
            RuntimeError: another message has arrived.
        """
        if self._device_channel is not None:
            for earlier in list(self._posted):  # in the order in which they were sent
                if earlier == address or address in self._early:
                    break
                self._early[earlier] = self._receive_message(earlier)
        form, tensors = self._early.pop(address) if address in self._early else self._receive_message(address)
        ready = [self._ready(tensor, each) for tensor, each in zip(tensors, form.forms, strict=True)]
        return tuple(ready), form.around

    def _receive_message(self, address: Address) -> tuple[header.Description, tuple[Tensor | None, ...]]:
        """Waits for a message, and returns its form and its tensors."""
        number, expected, packet, work, buffers, works = self._posted.pop(address)
        form = expected.form
        with self._transferring():
            work.wait()
        arrived_number, length, acknowledged, _ = packet.numbers
        if arrived_number != number:
            raise RuntimeError(
                f"message {arrived_number} of rank {self._rank} arrived instead of message {number}, for {address}"
            )
        with self._transferring():
            for each in works:
                each.wait()
        if length:
            data = torch.empty(length, dtype=torch.uint8)
            with self._transferring():
                self._incoming.recv([data], self._peer, 2 * number + 1).wait()
            description = data.numpy().tobytes()
            form = header.decode(description)
            # Likewise: the layers may change the values that they get.
            self._received_forms[address] = self._expect(header.decode(description))
            buffers = self._buffers(form)
            with self._transferring():
                for each in self._receive(number, buffers):
                    each.wait()
        tensors = packet.tensors() if expected.packed and not length else form.tensors(buffers)
        if not length and header.may_be_changed(form.around):
            form = header.decode(header.encode(form))
        if self._device_channel is not None:
            tensors = _with_device_tensors(self._device_channel, tensors, form)
        expected.packets.give_back(packet)
        self._release(acknowledged)
        self._note_arrival(number)
        return form, tensors

    def _ready(self, tensor: Tensor | None, form: tensor_form.TensorForm | None) -> Tensor | None:
        """A received tensor on its device, requiring a gradient if it did so there."""
        if tensor is None or form is None:
            return None
        if form.on_accelerator and self._device_channel is None and self._device is not None:
            tensor = tensor.to(self._device)
        if form.placed is not None:
            tensor = form.placed.whole(tensor, self._mesh)
        return tensor.requires_grad_() if form.requires_grad else tensor

    @contextlib.contextmanager
    def _transferring(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise LostConnectionError(self._rank) from error

    def flush(self) -> None:
        """Waits until everything has been sent."""
        self._release(self._sent)

    def abort(self) -> None:
        """Ends all transfers, also those that other threads wait for; the channel cannot be used any more."""
        break_group(self._outgoing)
        break_group(self._incoming)

    def forget(self) -> None:
        """After an abort, when no thread waits any more: drops all tensors of unfinished transfers."""
        self._kept.clear()
        self._posted.clear()
        self._early.clear()

    def _memories(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The memory of tensors that go through the CPU, without a packet."""
        present = [part for tensor in tensors if tensor is not None and (part := local_part(tensor)).numel()]
        if self._device_channel is not None:
            present = [tensor for tensor in present if not tensor_form.lies_on_accelerator(tensor)]
        return [tensor_form.memory_of(tensor).cpu() for tensor in present]

    def _buffers(self, form: header.Description) -> tuple[Tensor | None, ...]:
        """Memory for tensors that come through the CPU."""
        return tuple([each.room() if each is not None and self._through_cpu(each) else None for each in form.forms])

    def _through_cpu(self, form: tensor_form.TensorForm) -> bool:
        return self._device_channel is None or not form.on_accelerator

    def _is_posted(self, form: tensor_form.TensorForm | None) -> bool:
        """Whether the receive of such a tensor begins before its packet has arrived."""
        return form is not None and 0 not in form.shape and self._through_cpu(form)

    def _receive(self, number: int, buffers: Sequence[Tensor | None]) -> list[Any]:
        return [
            self._incoming.recv([buffer], self._peer, 2 * number + 1)
            for buffer in buffers
            if buffer is not None and buffer.numel()
        ]

    def _expect(self, form: header.Description) -> _Expected:
        """The expectation after a message of that form."""
        if not fits_in_packet(form.forms):
            return _Expected(form, self._nothing.packets, packed=False)
        packets = self._packets.get(form.forms)
        if packets is None:
            packets = self._packets[form.forms] = Packets(form.forms)
        return _Expected(form, packets, packed=True)

    def _release(self, acknowledged: int) -> None:
        """Drops the messages before this number, which the other rank has received."""
        while self._kept and self._kept[0].number < acknowledged:
            kept = self._kept[0]
            try:
                for work in kept.works:
                    work.wait()
            except RuntimeError as error:
                raise LostConnectionError(self._rank) from error
            kept.packets.give_back(kept.packet)
            self._kept.popleft()

    def _note_arrival(self, number: int) -> None:
        self._arrived_early.add(number)
        while self._arrived in self._arrived_early:
            self._arrived_early.remove(self._arrived)
            self._arrived += 1


def _with_device_tensors(
    device_channel: DeviceChannel, tensors: tuple[Tensor | None, ...], form: header.Description
) -> tuple[Tensor | None, ...]:
    """The tensors of a message, with those that come directly from the other accelerator."""
    forms = [each if each is not None and each.on_accelerator else None for each in form.forms]
    received = iter(device_channel.receive([each for each in forms if each is not None]))
    return tuple([tensor if each is None else next(received) for tensor, each in zip(tensors, forms, strict=True)])
