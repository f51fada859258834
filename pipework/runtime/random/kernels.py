"""Lets one thread draw random numbers from a generator of its own.

PyTorch has one default generator for the CPU. If two workers draw from it at once, their numbers depend on the order of
the draws, and saving and restoring its state around a recomputation is a race. Every random operator of the CPU ends in
one of a few kernels with a `generator` argument. So wrappers around these kernels fill in that argument:

    F.dropout -> aten::bernoulli_.float(self, p, generator=None) -> [here] -> the same kernel, generator=the thread's
    own

The fused kernels of accelerators take no generator: there the wrappers exchange the state of
the device's (`on_devices`).

On a thread without a stream (every thread but a worker inside a layer) a wrapper changes nothing. The dispatcher is
process-wide, and so are the wrappers. They are installed once, before a layer that may draw first runs, and never on
import.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from pipework import torch_private
from pipework.runtime.random.on_devices import device_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from pipework.runtime.random.on_devices import DeviceGenerator
    from pipework.runtime.random.streams import RandomStream
    from pipework.torch_private import GeneratorArgument


class _ThreadStream(threading.local):
    """The stream that the current thread draws from; the class attribute is what a new thread sees.

    Attributes:
        stream: see the class.
        of_shards: the contexts of modules that draw for a shard, and have not returned yet.
        drawn: the last number that was drawn for a key; None: there is none.
    """

    stream: RandomStream | None = None

    def __init__(self) -> None:
        self.of_shards: list[contextlib.AbstractContextManager[None]] = []
        self.drawn: Tensor | None = None


# The dispatcher's table is process-wide state of PyTorch; these three names mirror it.
thread_stream = _ThreadStream()
_lock = threading.Lock()
_libraries: dict[str, torch.library.Library] = {}  # by the type of device


_STATE_ACCESS: Final = ("get_rng_state", "set_rng_state")


def install(devices: Iterable[torch.device] = ()) -> None:
    """Installs the wrappers of the random kernels of the CPU and of further devices; later calls do nothing."""
    for kind in ("cpu", *{device.type for device in devices}):
        if kind in _libraries:
            continue
        with _lock:
            if kind not in _libraries:
                library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
                _wrap_kernels(library, kind)
                _wrap_state_access(kind)
                _libraries[kind] = library  # the last step: then no thread waits any more


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
    get_state, set_state = (getattr(module, name, None) for name in _STATE_ACCESS)
    if get_state is None or set_state is None:
        return
    own = _cpu_state_access(get_state, set_state) if kind == "cpu" else _device_state_access(kind, get_state, set_state)
    for name, function, original in zip(_STATE_ACCESS, own, (get_state, set_state), strict=True):
        functools.update_wrapper(function, original)
        for place in (module, getattr(module, "random", None)):
            if hasattr(place, name):
                setattr(place, name, function)


def _cpu_state_access(
    get_state: Callable[[], Tensor], set_state: Callable[[Tensor], None]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def get_rng_state() -> Tensor:
        stream = thread_stream.stream
        return get_state() if stream is None else stream.generator().get_state()

    def set_rng_state(new_state: Tensor) -> None:
        stream = thread_stream.stream
        if stream is None:
            set_state(new_state)
        else:
            stream.generator().set_state(new_state)

    return get_rng_state, set_rng_state


def _device_state_access(
    kind: str, get_state: Callable[..., Tensor], set_state: Callable[..., None]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def generator_of(device: Any) -> DeviceGenerator:
        number = device if isinstance(device, int) else torch.device(kind if device is None else device).index
        if number is None or number < 0:
            number = torch.get_device_module(kind).current_device()
        return device_generator(torch.device(kind, number))

    def get_rng_state(device: Any = None) -> Tensor:
        get = get_state if device is None else functools.partial(get_state, device)
        return generator_of(device).drawn(thread_stream.stream, get)  # type: ignore[no-any-return]

    def set_rng_state(new_state: Tensor, device: Any = None) -> None:
        given = (new_state,) if device is None else (new_state, device)
        generator_of(device).drawn(thread_stream.stream, functools.partial(set_state, *given))

    return get_rng_state, set_rng_state


def drawing_from(stream: RandomStream | None) -> contextlib.AbstractContextManager[None]:
    """A context in which this thread draws its random numbers from the stream."""
    return _Drawing(stream)


class _Drawing:
    __slots__ = ("_before", "_stream")

    def __init__(self, stream: RandomStream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before, thread_stream.stream = thread_stream.stream, self._stream

    def __exit__(self, *error: object) -> None:
        thread_stream.stream = self._before


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
