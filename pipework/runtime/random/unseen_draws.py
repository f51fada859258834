"""Draws from an accelerator's generator by kernels that have no wrapper.

PyTorch's dispatcher does not know what an extension launches. A wrapper of fused attention would take longer to call
than its kernel to launch, and few models have dropout there. The dropout of a recurrent layer has a state of its own,
which begins anew when the generator is seeded. Such kernels read and move the generator in the state that it has. So a
worker holds the generator during each of its actions, and seeds it for each layer:

* in the worker's first runs, because it is not known yet how its layers draw;
* in all later runs, if a kernel without a wrapper has moved the generator, or if a recurrent layer has dropout;
* in all runs if workers are processes: each process mostly has a device for itself, so that no other one waits.

If such a kernel moves the generator for the first time in a later run, the numbers of that run cannot be drawn again.
That is an error, and from then on the worker holds the generator.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from pipework.runtime.random import kernels
from pipework.runtime.random.kernels import device_generator
from pipework.runtime.random.streams import Key, RandomStream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

    import torch

    from pipework.runtime.random.kernels import DeviceGenerator, State

LOOKS: Final = 4  # runs of a worker; a mini-batch whose loss is outside has two


class UnseenDraws:
    """Whether layers of one worker draw by kernels that have no wrapper.

    Attributes:
        generator: of the worker's device.
        found: whether a kernel without a wrapper has moved the generator.
    """

    def __init__(self, generator: DeviceGenerator) -> None:
        self.generator = generator
        self.found = False
        self._runs = 0

    def hold(self, stream: RandomStream, *, always: bool) -> Hold | None:
        """The context that the actions of the next run enter; None: they need none.

        Args:
            stream: of the worker.
            always: whether a layer is known to need it.
        """
        self._runs += 1
        looks = self._runs <= LOOKS and not self.generator.is_captured()
        return Hold(self, stream) if always or self.found or looks else None


class Hold:
    """A context in which one thread alone draws from a generator; the end restores the generator's state.

    Args:
        draws: gets to know whether a kernel without a wrapper draws.
        stream: whose numbers the generator draws meanwhile.
        locked: whether a lock keeps other threads from drawing. Without it the caller makes sure that none draws.
    """

    def __init__(self, draws: UnseenDraws, stream: RandomStream, *, locked: bool = True) -> None:
        draws.generator.get()  # raises its error here, before any worker begins
        self.generator = draws.generator
        self._draws = draws
        self._stream = stream
        self._locked = locked
        self._found: State = ()
        self._noted: State = ()

    def __enter__(self) -> Self:
        if self._locked:
            self.generator.lock.acquire()
        self._found = self._noted = self.generator.get()
        self._stream.holds[self.generator] = self
        return self

    def __exit__(self, *error: object) -> None:
        self._look()
        del self._stream.holds[self.generator]
        self.generator.set(self._found)
        if self._locked:
            self.generator.lock.release()

    def move(self, state: State) -> None:
        """Sets the generator."""
        self._look()
        self.generator.set(state)
        self._noted = state

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Inside, the generator starts from a seed; afterwards it goes on where it was."""
        before = self.generator.get()
        self.move(self.generator.seeded(seed))
        try:
            yield
        finally:
            self.move(before)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Around a kernel that a wrapper sees."""
        self._look()
        try:
            yield
        finally:
            self._noted = self.generator.get()

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Inside, other threads may hold the generator; afterwards it is as it was before."""
        own = self.generator.get()
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
            self.move(own)

    def _look(self) -> None:
        self._draws.found |= self.generator.get() != self._noted


@contextlib.contextmanager
def generators_given_up() -> Iterator[None]:
    """A context for a call that waits for other workers: they may need a generator that this thread holds.

    A layer that calls another pipe may do so while it holds the generator of its device.

    Raises:
        RuntimeError: the other workers would launch what this thread captures.
    """
    stream = kernels.thread_stream.stream
    if stream is not None and stream.is_captured:
        raise RuntimeError(
            "a layer calls a pipe while it is captured as a graph, which would not have what the workers of that pipe "
            "launch: call the layers of that pipe, or leave graphs= out"
        )
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
            stack.enter_context(Hold(UnseenDraws(device_generator(device)), stream, locked=locked))
        yield stream


class LateDraws:
    """Notes the states of some workers' generators before a run, and looks at them afterwards.

    Args:
        draws: of the workers whose layers may draw, and which do not hold their generators. Other generators are left
            out: the user's threads may draw from them by a kernel without a wrapper, which is no error.
    """

    def __init__(self, draws: Sequence[UnseenDraws]) -> None:
        self._draws = draws
        generators = {each.generator for each in self._draws}
        # While a graph is captured nobody may ask for a state.
        self._before = {each: each.state_and_draws() for each in generators if not each.is_captured()}

    def error(self) -> RuntimeError | None:
        """The error if a kernel that no wrapper saw has moved a generator, which is put back; None: none has."""
        moved = [each for each, before in self._before.items() if each.put_back(before)]
        if not moved:
            return None
        for each in self._draws:
            each.found |= each.generator in moved
        places = ", ".join(sorted(str(each.device) for each in moved))
        return RuntimeError(
            f"a layer on {places} drew random numbers by a kernel of an extension or of fused attention, or seeded its "
            "generator, and none did so in the first mini-batches: in a recomputation the numbers would be others. "
            "No gradient of this mini-batch was delivered. Call the pipe again: from now on its layers may do so"
        )
