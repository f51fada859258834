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
from typing import TYPE_CHECKING

import torch

from pipework.runtime.random.on_devices import GeneratorGuard, device_generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


class WorkerDevice:
    """The device of one worker; for an accelerator with the stream that the worker computes on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device) if is_accelerator(device) else None

    def enter_thread(self) -> None:
        """Makes the device and its stream the current ones of this thread."""
        if self.stream is not None:
            torch.accelerator.set_device_index(self.device)
            torch.accelerator.set_stream(self.stream)

    def wait_for_caller(self) -> None:
        """Called by the caller's thread: the worker's next kernels run after all that the caller has launched."""
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))

    def hand_over(self, tensors: Sequence[Tensor | None]) -> None:
        """Called by the thread that reads the worker's results: its stream may read them from now on."""
        if self.stream is not None:
            current = torch.accelerator.current_stream(self.device)
            current.wait_stream(self.stream)
            record_on(current, tensors)

    def generator_guard(self, *, moves: bool) -> GeneratorGuard | None:
        """What guards the device's default generator; None on the CPU, where each worker has one of its own.

        Args:
            moves: see `GeneratorGuard`.
        """
        return None if self.stream is None else GeneratorGuard(device_generator(self.device), moves=moves)

    def clock(self) -> Clock:
        """A clock whose marks are passed when the device has completed what was launched before."""
        return Clock() if self.stream is None else StreamClock(self.device, self.stream)


class Clock:
    """The clock of a CPU worker, in seconds of `time.perf_counter`."""

    def now(self) -> float | torch.Event:
        """A mark of the present time."""
        return time.perf_counter()

    def seconds(self, mark: float | torch.Event) -> float:
        """The time of a mark, in seconds."""
        assert isinstance(mark, float)
        return mark


class StreamClock(Clock):
    """The clock of an accelerator's stream: the device completes a kernel long after the host has launched it."""

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device = device
        self._stream = stream
        stream.synchronize()
        self._origin_event = torch.Event(device, enable_timing=True)
        self._origin_event.record(stream)
        self._origin = time.perf_counter()

    def now(self) -> float | torch.Event:
        """An event in the stream."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, mark: float | torch.Event) -> float:
        """The time when the stream passed the event, in seconds."""
        assert isinstance(mark, torch.Event)
        mark.synchronize()
        return self._origin + self._origin_event.elapsed_time(mark) / 1e3


class Link:
    """Carries tensors from one worker's device to another's, in one direction.

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

    def depart(self, tensors: tuple[Tensor | None, ...]) -> tuple[tuple[Tensor | None, ...], torch.Event | None]:
        """On the sender's thread: starts the copy, if one is needed.

        Returns:
            The tensors on the destination, and the event after which they may be read.
        """
        event = None if self._source.stream is None else self._source.stream.record_event()
        if not self._crosses:
            return tensors, event
        with contextlib.ExitStack() as current:
            for stream in self.copy_streams:
                if event is not None:
                    stream.wait_event(event)
                current.enter_context(stream)
            copies = tuple(None if tensor is None else self._copy(tensor) for tensor in tensors)
        # A copy between two accelerators runs on the source's stream, and the destination's stream waits for it, so an
        # event of the last stream comes after all copies.
        return copies, self.copy_streams[-1].record_event()

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

    def hand_over(self) -> None:
        """Called by the caller's thread after a failure: its streams wait for copies that nobody has received."""
        for stream in self.copy_streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)

    def _copy(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            copy = tensor.to(self._destination.device, non_blocking=True)
        if self._source.stream is not None and tensor.device == self._source.device:
            tensor.record_stream(self.copy_streams[0])
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
