"""Lets one thread draw random numbers from a generator of its own.

PyTorch has one default generator for the CPU. If two workers draw from it at once, their numbers depend on the order of
the draws, and saving and restoring its state around a recomputation is a race. Every random operator of the CPU ends in
one of a few kernels with a `generator` argument. So wrappers around these kernels fill in that argument:

    F.dropout -> aten::bernoulli_.float(self, p, generator=None) -> [here] -> the same kernel, generator=the thread's
    own

On a thread without a stream (every thread but a worker inside a layer) a wrapper changes nothing. The dispatcher is
process-wide, and so are the wrappers. They are installed once, before a layer that may draw first runs, and never on
import.

An accelerator's fused kernels (dropout, attention) take no generator. They draw from the device's default one, which
all threads of the process share: the workers of every pipe, and the caller. So the wrappers around the kernels
exchange its state for as long as it takes to launch one of them:

    F.dropout -> aten::native_dropout -> [lock; seed and offset of the stream in] -> the same kernel
                                         [offset of the stream noted; what was there before back in; unlock]

The state is a few numbers on the host, so nothing waits for the device, and layers that draw nothing pay nothing.
Kernels that no wrapper sees are the matter of `unseen_draws`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from pipework.runtime.random.streams import RandomStream
    from pipework.torch_private import GeneratorArgument


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

    def get(self) -> State:
        """The state.

        Raises:
            RuntimeError: the device does not let its generator be moved, as while a graph is captured.
        """
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
        """Restores the state of an earlier `state_and_draws` if it has moved since then without a counted draw.

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
        """Runs a function that draws from the generator or asks for its state.

        Args:
            stream: of this thread; None: it has none.
            draw: the function.
        """
        others = () if stream is None or self in stream.holds else list(stream.holds.values())
        # While this thread waits for this generator, another thread may wait for one that this thread holds.
        for hold in others:
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


class _ThreadStream(threading.local):
    """The stream that the current thread draws from; the class attribute is what a new thread sees.

    Attributes:
        stream: see the class.
        of_shards: the contexts of modules that draw for a shard, and have not returned yet.
    """

    stream: RandomStream | None = None

    def __init__(self) -> None:
        self.of_shards: list[contextlib.AbstractContextManager[None]] = []


# The dispatcher's table is process-wide state of PyTorch; these three names mirror it.
thread_stream = _ThreadStream()
_lock = threading.Lock()
_libraries: dict[str, torch.library.Library] = {}  # by the type of device


_STATE_ACCESS: Final = ("get_rng_state", "set_rng_state")


def install(devices: Iterable[torch.device] = ()) -> None:
    """Installs the wrappers of the random kernels of the CPU and of further devices; later calls do nothing."""
    for kind in ("cpu", *{device.type for device in devices}):
        with _lock:
            if kind not in _libraries:
                library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
                _wrap_kernels(library, kind)
                _wrap_state_access(kind)
                _libraries[kind] = library


def _wrap_kernels(library: torch.library.Library, kind: str) -> None:
    key = torch_private.dispatch_key(kind)
    with warnings.catch_warnings():
        # PyTorch warns when a kernel is replaced, which is intended here.
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for operator, argument in torch_private.random_operators(key).items():
            kernel = torch.library.get_kernel(operator, key)
            if kind != "cpu":
                wrapper = _with_exchanged_generator(kernel, argument)
            elif argument is not None:
                wrapper = _with_thread_stream(kernel, argument)
            else:
                continue  # on the CPU it is made of the others
            library.impl(  # type: ignore[no-untyped-call]
                operator.removeprefix("aten::"), wrapper, key, with_keyset=True, allow_override=True
            )


def _wrap_state_access(kind: str) -> None:
    """Makes `get_rng_state` and `set_rng_state` read and write the thread's stream, if it has one.

    torch.utils.checkpoint saves the state in a layer's forward, and restores it to compute the layer again.
    """
    module = torch if kind == "cpu" else torch.get_device_module(kind)
    originals: list[Any] = [getattr(module, name, None) for name in _STATE_ACCESS]
    if None in originals:
        return

    def accessed(original: Any, method: str, state: tuple[Tensor, ...], device: Any) -> Any:
        stream, given = thread_stream.stream, state if device is None else (*state, device)
        if kind != "cpu":
            return _generator_of(kind, device).drawn(stream, functools.partial(original, *given))
        return original(*given) if stream is None else getattr(stream.accessed(), method)(*state)

    def get_rng_state(device: Any = None) -> Any:
        return accessed(originals[0], "get_state", (), device)

    def set_rng_state(new_state: Tensor, device: Any = None) -> None:
        accessed(originals[1], "set_state", (new_state,), device)

    own: list[Any] = [get_rng_state, set_rng_state]
    for name, function, original in zip(_STATE_ACCESS, own, originals, strict=True):
        functools.update_wrapper(function, original)
        for place in (module, getattr(module, "random", None)):
            if hasattr(place, name):
                setattr(place, name, function)


def _generator_of(kind: str, device: Any) -> DeviceGenerator:
    """The generator of an accelerator as functions for a state name it; None: of the current one."""
    number = device if isinstance(device, int) else torch.device(kind if device is None else device).index
    if number is None or number < 0:
        number = torch.get_device_module(kind).current_device()
    return device_generator(torch.device(kind, number))


@contextlib.contextmanager
def drawing_from(stream: RandomStream | None) -> Iterator[None]:
    """A context in which this thread draws its random numbers from the stream."""
    before, thread_stream.stream = thread_stream.stream, stream
    try:
        yield
    finally:
        thread_stream.stream = before


def _with_thread_stream(kernel: Any, argument: GeneratorArgument) -> Callable[..., Any]:
    """A kernel of the CPU, which is given the generator of the thread's stream."""
    position, keyword_only = argument.position, argument.keyword_only

    def draw(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        stream = thread_stream.stream
        if stream is not None:
            if keyword_only or len(args) <= position:
                if kwargs.get("generator") is None:
                    kwargs["generator"] = stream.generator()
            elif args[position] is None:
                args = (*args[:position], stream.generator(), *args[position + 1 :])
        return kernel.call_boxed(keyset, *args, **kwargs)

    return draw


def _with_exchanged_generator(kernel: Any, argument: GeneratorArgument | None) -> Callable[..., Any]:
    """A kernel of an accelerator, for which the default generator has the state of the thread's stream."""
    position = None if argument is None or argument.keyword_only else argument.position

    def draw(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        asked = args[position] if position is not None and len(args) > position else kwargs.get("generator")
        if asked is not None:
            return kernel.call_boxed(keyset, *args, **kwargs)
        place = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)).device
        run = functools.partial(kernel.call_boxed, keyset, *args, **kwargs)
        return device_generator(place).drawn(thread_stream.stream, run)

    return draw
