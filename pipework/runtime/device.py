"""The devices of workers, and the links that carry tensors from one device to another.

A CPU worker is a thread with its share of the cores. An accelerator worker is a thread that launches kernels into a
stream of its own. Streams of different workers are independent, so a tensor that goes from one to another needs this:

    the reader's stream waits for the writer's event        (order)
    the tensor is recorded on the reader's stream           (its memory is not reused while the reader still needs it)
    copies between devices run on streams of their own      (so that they overlap with computation)

Only `torch.accelerator`, `torch.Stream` and `torch.Event` are used, so that more than CUDA works.
"""

from __future__ import annotations

import contextlib
import time
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from pipework.runtime.failure import add_note
from pipework.runtime.free_memory import HostAccount
from pipework.runtime.host_memory import HostMemory
from pipework.runtime.random.kernels import device_generator
from pipework.runtime.random.unseen_draws import UnseenDraws
from pipework.values.shared_memory import apart, together
from pipework.values.tensor_form import copied

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class WorkerDevice:
    """The device of one worker; for an accelerator with the stream that the worker computes on.

    Args:
        device: as below.
        account: of the workers of the process; None: there are no others.

    Attributes:
        device: PyTorch's name of it.
        stream: None: the device is the CPU.
        unseen_draws: what the worker knows of its layers; None on the CPU, where each worker has a generator.
    """

    def __init__(self, device: torch.device, account: HostAccount | None = None) -> None:
        self.device = device
        self._account = account or HostAccount()
        self.stream = torch.Stream(device) if is_accelerator(device) else None
        self.unseen_draws = None if self.stream is None else UnseenDraws(device_generator(device))

    @cached_property
    def host_memory(self) -> HostMemory:
        """Where activations of the worker's stages go for a while; made when the first ones go."""
        return HostMemory(self.device, self.stream, self._account)

    def begin_thread(self) -> None:
        """Called by a new thread of the worker."""
        if self.stream is not None:
            # A thread has no CUDA context before its first call of the runtime. cuBLAS warns of that, and takes the
            # context of the first GPU.
            self.stream.query()

    def enter_thread(self) -> None:
        """Makes the stream the current one of this thread, and its device, too."""
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)

    def wait_for_caller(self) -> None:
        """Called by the caller's thread: the worker's next kernels run after all that the caller has launched."""
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))

    def hand_over(self, tensors: Iterable[Tensor | None]) -> None:
        """Called by the thread that reads the worker's results: the thread's stream may read them from now on."""
        if self.stream is not None:
            current = torch.accelerator.current_stream(self.device)
            current.wait_stream(self.stream)
            record_on(current, tensors)

    def clock(self) -> Clock:
        """A clock whose marks are passed when the device has completed what was launched before."""
        return Clock(self.device, self.stream)


class Clock:
    """The clock of a worker, in seconds of `time.perf_counter`.

    On an accelerator a kernel ends long after the host has launched it. There a mark is an event in the worker's
    stream, and its time is the moment when the stream has passed it.
    """

    def __init__(self, device: torch.device, stream: torch.Stream | None) -> None:
        self._device = device
        self._stream = stream
        if stream is not None:
            stream.synchronize()
            self._origin_event = torch.Event(device, enable_timing=True)
            self._origin_event.record(stream)
        self._origin = time.perf_counter()

    def now(self, stream: torch.Stream | None = None) -> float | torch.Event:
        """A mark of the present time, in the worker's stream or in another one of the device."""
        if self._stream is None:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(stream or self._stream)
        return event

    def seconds(self, mark: float | torch.Event) -> float:
        """The time of a mark, in seconds."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._origin + self._origin_event.elapsed_time(mark) / 1e3


class Link:
    """Carries tensors from one worker's device to another's, in one direction; or from the caller to a worker's.

    Attributes:
        copy_streams: streams of its own, on which it copies; none if both ends are on one device.
    """

    def __init__(self, source: WorkerDevice, destination: WorkerDevice) -> None:
        self._source = source
        self._destination = destination
        self._crosses = source.device != destination.device
        self.copy_streams = [
            torch.Stream(end.device) for end in (source, destination) if self._crosses and end.stream is not None
        ]
        self._computed: torch.Event | None = None  # what is copied; waited for by the thread that records it
        self._copies = False  # since the last `hand_over`

    def depart(self, tensors: tuple[Tensor | None, ...]) -> tuple[tuple[Tensor | None, ...], torch.Event | None]:
        """On the sender's thread: starts the copy, if one is needed.

        Returns:
            The tensors on the destination, and the event after which they may be read.
        """
        source, streams = self._source.stream, self.copy_streams
        if self._source is self._destination:
            return tensors, None  # from the caller, for whose stream the worker's has waited
        if all(tensor is None for tensor in tensors):
            return tensors, None  # such as the gradients of inputs that need none
        if not self._crosses:
            return tensors, None if source is None else source.record_event()
        self._copies = True
        if source is not None:
            self._computed = source.record_event()
            streams[0].wait_event(self._computed)
        with contextlib.ExitStack() as current:
            for stream in streams:
                current.enter_context(stream)
            carried, parts = together(tensors)
            copies = apart(tuple(None if tensor is None else self._copy(tensor) for tensor in carried), parts)
        # A copy between two accelerators runs on the source's stream, and the destination's stream waits for it, so an
        # event of the last stream comes after all copies.
        return copies, streams[-1].record_event()

    def arrive(self, tensors: tuple[Tensor | None, ...], event: torch.Event | None) -> None:
        """On the receiver's thread, before the tensors are read."""
        stream = self._destination.stream
        if stream is None:
            if event is not None:
                event.synchronize()
            return
        if event is not None:
            stream.wait_event(event)
        record_on(stream, tensors)

    def hand_over(self, *, received: bool) -> None:
        """Called by the caller's thread after a run: its streams wait for copies of what it may write to.

        A worker waits for what it receives. But a copied tensor may be an input or a parameter that a layer has
        returned as it is, and the stream of the worker that sent it waits for no copy.

        Args:
            received: whether the destination has received all copies.
        """
        if not self._copies:
            return
        self._copies = False
        for stream in self.copy_streams:
            if not received or stream.device == self._source.device:
                torch.accelerator.current_stream(stream.device).wait_stream(stream)

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._source.stream is not None:
            if tensor.device == self._source.device:
                tensor.record_stream(self.copy_streams[0])
            elif self._computed is not None:
                # A layer has moved it by itself, in the stream of its worker.
                self.copy_streams[-1].wait_event(self._computed)
        try:
            # Detached: entering no_grad takes the host longer.
            copy = copied(tensor.detach() if tensor.requires_grad else tensor, self._destination.device)
        except torch.OutOfMemoryError as error:
            add_note(error, f"no memory on {self._destination.device} for a tensor that was sent there")
            raise
        return copy.requires_grad_() if tensor.requires_grad else copy


def record_on(stream: torch.Stream, tensors: Iterable[Tensor | None]) -> None:
    """Memory of those on the stream's device is not reused before the stream has done what it was given so far."""
    for tensor in tensors:
        if tensor is not None and tensor.device == stream.device:
            tensor.record_stream(stream)


def link(source: WorkerDevice, destination: WorkerDevice) -> Link | None:
    """The link between two workers, or None if tensors can be passed by reference."""
    if source.stream is None and destination.stream is None and source.device == destination.device:
        return None
    return Link(source, destination)


def is_accelerator(device: torch.device) -> bool:
    """Whether the device computes asynchronously, in streams."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type
