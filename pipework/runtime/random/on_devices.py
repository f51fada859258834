"""The default generators of accelerators: each kernel that draws finds the state of its thread's stream there.

An accelerator's fused kernels (dropout, attention) take no generator. They draw from the device's default one, which
all threads of the process share: the workers of every pipe, and the caller. So the wrappers around the kernels
(`kernels`) exchange its state for as long as it takes to launch one of them:

    F.dropout -> aten::native_dropout -> [lock; seed and offset of the stream in] -> the same kernel
                                         [offset of the stream noted; what was there before back in; unlock]

The state is a few numbers on the host, so nothing waits for the device, and layers that draw nothing pay nothing.
Kernels that no wrapper sees are the matter of `unseen_draws`.
"""

from __future__ import annotations

import inspect
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.runtime.random.streams import RandomStream

State: TypeAlias = tuple[int, ...]
"""Seed and offset; of a device whose module has functions for a state only, the bytes of that."""


class DeviceGenerator:
    """The default generator of an accelerator, with the lock of whoever draws from it; see `device_generator`.

    Attributes:
        device: the accelerator.
        lock: held while the state is another one than the caller's.
        draws_by_others: how many kernels have drawn from it as it was: the caller's, and those of evaluations.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.draws_by_others = 0
        self._is_exchanged = False

    @cached_property
    def _own(self) -> torch.Generator | None:
        """The generator itself; None: the device's module has functions for its state only, as `torch.mps`."""
        module = torch.get_device_module(self.device)
        generators = getattr(module, "default_generators", ())
        if self.device.index is not None and self.device.index < len(generators):
            return generators[self.device.index]  # type: ignore[no-any-return]
        if callable(getattr(module, "get_rng_state", None)) and callable(getattr(module, "set_rng_state", None)):
            return None
        raise RuntimeError(
            f"layers on {self.device} may draw random numbers, and its module {module.__name__} has neither "
            "default_generators nor get_rng_state and set_rng_state, so that they could not be drawn again in a "
            "recomputation: run these layers on another device, or give the module these functions"
        )

    def check(self) -> None:
        """Raises a RuntimeError if the device does not let its generator be moved, as while a graph is captured."""
        self.get()

    def get(self) -> State:
        """The state. Not to be asked for while a graph is captured."""
        if self._own is not None:
            return self._own.initial_seed(), self._own.get_offset()
        # The function itself, not the one that `kernels` has put in its place.
        get_state = inspect.unwrap(torch.get_device_module(self.device).get_rng_state)
        return tuple(get_state(self.device).tolist())

    def set(self, state: State) -> None:
        """Restores a state."""
        if self._own is not None:
            seed, offset = state
            self._own.manual_seed(seed).set_offset(offset)
        else:
            put_state = inspect.unwrap(torch.get_device_module(self.device).set_rng_state)
            put_state(torch.tensor(state, dtype=torch.uint8), self.device)

    def seeded(self, seed: int) -> State:
        """The state at the beginning of the stream of a 64-bit seed."""
        if self._own is not None:
            return seed, 0
        return tuple(torch.Generator(self.device).manual_seed(seed).get_state().tolist())

    def is_captured(self) -> bool:
        """Whether this thread captures a graph, so that kernels do not run yet and the state is none."""
        asked = getattr(torch.get_device_module(self.device), "is_current_stream_capturing", None)
        return asked is not None and bool(asked())

    def state_and_draws(self) -> tuple[State, int]:
        """The state that the caller sees, and `draws_by_others`."""
        with self.lock:
            return self.get(), self.draws_by_others

    def put_back(self, before: tuple[State, int]) -> bool:
        """Puts it back if it has moved since an earlier `state_and_draws`, and nobody is counted who may have done so.

        Returns:
            Whether it has moved.
        """
        with self.lock:
            (state, draws), (state_before, draws_before) = self.state_and_draws(), before
            if state == state_before or draws != draws_before:
                return False
            self.set(state_before)
            return True

    def drawn(self, stream: RandomStream | None, draw: Callable[[], Any]) -> Any:
        """Runs what draws from the generator, or asks for its state.

        Args:
            stream: of this thread; None: it has none.
            draw: what is run.
        """
        others = () if stream is None or self in stream.holds else list(stream.holds.values())
        for hold in others:  # while this thread waits for this one, another thread may wait for those that it holds
            with hold.given_up():
                return self.drawn(stream, draw)
        with self.lock:
            if stream is None or not stream.moves_generators:
                self.draws_by_others += 1
                return draw()
            if self in stream.holds:
                with stream.holds[self].noting():
                    return draw()
            if self._is_exchanged:  # the kernel of one operator calls another one
                return draw()
            found = self.get()
            self.set(stream.state_on(self))
            self._is_exchanged = True
            try:
                return draw()
            finally:
                self._is_exchanged = False
                stream.keep_state_on(self, self.get())
                self.set(found)


# A device's default generator is one for the whole process, and so is its lock: pipes that know nothing of each other
# move the same one. PyTorch's generators take no attributes, which would be the other place.
_generators: dict[torch.device, DeviceGenerator] = {}


def device_generator(device: torch.device) -> DeviceGenerator:
    """The default generator of an accelerator; the same object for the same device."""
    return _generators.get(device) or _generators.setdefault(device, DeviceGenerator(device))
