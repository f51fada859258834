"""Random streams on accelerators: a device's default generator is moved by one thread at a time, which puts it back.

An accelerator's fused kernels (dropout, attention) take no generator. So a layer gets its stream by seeding the
device's default generator. All threads of the process draw from that one: the workers of every pipe, and the caller. A
worker holds it from the seed to the last draw, and leaves it in the state that it found.
"""

from __future__ import annotations

import contextlib
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from pipework.runtime.random import kernels
from pipework.runtime.random.streams import Key, RandomStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from torch import Tensor


class DeviceGenerator:
    """The default generator of an accelerator, with the lock of whoever moves it; see `device_generator`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lock = threading.RLock()

    @cached_property
    def _own(self) -> torch.Generator | None:
        """The generator itself; None: the device's module has functions for its state only, as `torch.mps`."""
        module = torch.get_device_module(self._device)
        generators = getattr(module, "default_generators", ())
        if self._device.index is not None and self._device.index < len(generators):
            return generators[self._device.index]  # type: ignore[no-any-return]
        if callable(getattr(module, "get_rng_state", None)) and callable(getattr(module, "set_rng_state", None)):
            return None
        raise RuntimeError(
            f"layers on {self._device} may draw random numbers, and its module {module.__name__} has neither "
            "default_generators nor get_rng_state and set_rng_state, so that they could not be drawn again in a "
            "recomputation: run these layers on another device, or give the module these functions"
        )

    def check(self) -> None:
        """Raises a RuntimeError if the device does not let its generator be moved."""
        _ = self._own

    def get_state(self) -> Tensor:
        """The state."""
        if self._own is not None:
            return self._own.get_state()
        return torch.get_device_module(self._device).get_rng_state(self._device)  # type: ignore[no-any-return]

    def set_state(self, state: Tensor) -> None:
        """Restores a state."""
        if self._own is not None:
            self._own.set_state(state)
        else:
            torch.get_device_module(self._device).set_rng_state(state, self._device)

    def seed(self, seed: int) -> None:
        """Starts the stream of a 64-bit seed."""
        if self._own is not None:
            self._own.manual_seed(seed)
        else:
            self.set_state(torch.Generator(self._device).manual_seed(seed).get_state())


# A device's default generator is one for the whole process, and so is its lock: pipes that know nothing of each other
# move the same one. PyTorch's generators take no attributes, which would be the other place.
_generators: dict[torch.device, DeviceGenerator] = {}


def device_generator(device: torch.device) -> DeviceGenerator:
    """The default generator of an accelerator; the same object for the same device."""
    return _generators.get(device) or _generators.setdefault(device, DeviceGenerator(device))


class GeneratorGuard:
    """A context manager around what one thread draws on an accelerator.

    Args:
        generator: of the accelerator.
        moves: whether the generator is seeded inside, and so put back at the end. If not, numbers are drawn from it as
            it is, and the guard only keeps others from moving it meanwhile.

    Raises:
        RuntimeError: the generator is to be moved, and the device does not let it.
    """

    __slots__ = ("_found", "_generator", "_held", "seed")

    def __init__(self, generator: DeviceGenerator, *, moves: bool) -> None:
        if moves:
            generator.check()
        self._generator = generator
        self._held = False
        self._found: Tensor | None = None
        self.seed: Callable[[int], None] | None = generator.seed if moves else None

    def __enter__(self) -> Self:
        self._generator.lock.acquire()
        try:
            if self.seed is not None:
                self._found = self._generator.get_state()
        except BaseException:
            self._generator.lock.release()
            raise
        self._held = True
        return self

    def __exit__(self, *error: object) -> None:
        self._held = False
        found, self._found = self._found, None
        try:
            if found is not None:
                self._generator.set_state(found)
        finally:
            self._generator.lock.release()

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Inside, the generator starts from a seed, if it may be moved; afterwards it goes on where it was."""
        if self.seed is None:
            yield
            return
        before = self._generator.get_state()
        self.seed(seed)
        try:
            yield
        finally:
            self._generator.set_state(before)

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Inside, other threads may hold the generator; afterwards it is as it was before."""
        if not self._held:
            yield
            return
        own: Any = None if self.seed is None else self._generator.get_state()
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
            if own is not None:
                self._generator.set_state(own)


def generator_given_up() -> contextlib.AbstractContextManager[None]:
    """A context for a call that waits for other workers: they may need the generator that this thread holds.

    A layer that calls another pipe does so while it holds the generator of its device.
    """
    stream = kernels.thread_stream.stream
    return contextlib.nullcontext() if stream is None or stream.guard is None else stream.guard.given_up()


@contextlib.contextmanager
def generators_left_alone(device: torch.device) -> Iterator[None]:
    """Inside, this thread draws from a stream of its own, on the CPU and on a device, and moves no generator."""
    kernels.install()
    guard = None if device.type == "cpu" else GeneratorGuard(device_generator(device), moves=True)
    stream = RandomStream(Key(0), guard)
    with kernels.drawing_from(stream), contextlib.nullcontext() if guard is None else guard:
        stream.enter(0, 0)
        yield
