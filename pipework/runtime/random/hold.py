"""A worker holds the generator of its accelerator while it computes, if its layers may draw.

Many kernels take no generator: fused dropout and attention, recurrent layers, extensions. They draw from the device's
default one, which all threads of the process share. So a worker whose layers may draw locks that generator during each
forward and backward, seeds it for each layer, and puts it back. Any kernel then finds the stream of its layer, and what
the caller's generator gives is as if no layer had drawn.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pipework.runtime.random import kernels
from pipework.runtime.random.kernels import device_generator
from pipework.runtime.random.streams import Key, RandomStream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    import torch

    from pipework.runtime.random.kernels import DeviceGenerator, State


class Hold:
    """A context in which one thread alone draws from a generator; the end restores the generator's state.

    Args:
        generator: of an accelerator.
        stream: whose numbers the generator draws meanwhile.
        locked: whether a lock keeps other threads from drawing. Without it the caller makes sure that none draws.
    """

    def __init__(self, generator: DeviceGenerator, stream: RandomStream, *, locked: bool = True) -> None:
        generator.get()  # raises its error here, before any worker begins
        self.generator = generator
        self._stream = stream
        self._locked = locked
        self._found: State = ()

    def __enter__(self) -> Self:
        if self._locked:
            self.generator.lock.acquire()
        self._found = self.generator.get()
        self._stream.holds[self.generator] = self
        return self

    def __exit__(self, *error: object) -> None:
        del self._stream.holds[self.generator]
        self.generator.set(self._found)
        if self._locked:
            self.generator.lock.release()

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Inside, the generator starts from a seed; afterwards it goes on where it was."""
        before = self.generator.get()
        self.generator.set(self.generator.seeded(seed))
        try:
            yield
        finally:
            self.generator.set(before)

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Inside, other threads may hold the generator; afterwards it is as it was before."""
        own = self.generator.get()
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
            self.generator.set(own)


@contextlib.contextmanager
def generators_given_up() -> Iterator[None]:
    """A context for a call that waits for other workers: they may need a generator that this thread holds.

    A layer that calls another pipe may do so while it holds the generator of its device.
    """
    stream = kernels.thread_stream.stream
    with contextlib.ExitStack() as stack:
        for hold in () if stream is None else list(stream.holds.values()):
            stack.enter_context(hold.given_up())
        yield


@contextlib.contextmanager
def generators_left_alone(devices: Iterable[torch.device], key: int, *, locked: bool = True) -> Iterator[RandomStream]:
    """A context in which this thread draws from a stream of its own, and moves no generator of the CPU or of devices.

    Args:
        devices: on which it may draw; those of the CPU need no mention.
        key: of the stream.
        locked: see `Hold`.

    Yields:
        The stream.
    """
    accelerators = [device for device in devices if device.type != "cpu"]
    kernels.install(accelerators)
    stream = RandomStream(Key(key))
    with kernels.drawing_from(stream), contextlib.ExitStack() as stack:
        for device in accelerators:
            stack.enter_context(Hold(device_generator(device), stream, locked=locked))
        yield stream
