"""Lets one thread draw CPU random numbers from a generator of its own.

PyTorch has one default generator for the CPU. If two workers draw from it at once, their numbers depend on the order of
the draws, and saving and restoring its state around a recomputation is a race. Every random operator of the CPU ends in
one of a few kernels with a `generator` argument. So wrappers around these kernels fill in that argument:

    F.dropout -> aten::bernoulli_.float(self, p, generator=None) -> [here] -> the same kernel, generator=the thread's
    own

On a thread without a stream (every thread but a worker inside a layer) a wrapper changes nothing. The dispatcher is
process-wide, and so are the wrappers. They are installed once, before a layer that may draw first runs, and never on
import.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pipework.runtime.random.streams import RandomStream


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
_library: torch.library.Library | None = None


def install() -> None:
    """Installs the wrappers of the CPU's random kernels; later calls do nothing."""
    global _library
    if _library is not None:
        return
    with _lock:
        if _library is None:
            library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            with warnings.catch_warnings():
                # PyTorch warns when a kernel is replaced, which is intended here.
                warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
                for operator, (position, keyword_only) in torch_private.generator_arguments().items():
                    library.impl(  # type: ignore[no-untyped-call]
                        operator.removeprefix("aten::"),
                        _with_thread_stream(operator, position, keyword_only),
                        "CPU",
                        with_keyset=True,
                        allow_override=True,
                    )
            _install_state_access()
            _library = library  # the last step: then no thread waits any more


def _install_state_access() -> None:
    """Makes `get_rng_state` and `set_rng_state` read and write the thread's stream, if it has one.

    torch.utils.checkpoint saves the state in a layer's forward, and restores it to compute the layer again.
    """
    get_state, set_state = torch.get_rng_state, torch.set_rng_state

    def get_rng_state() -> Tensor:
        stream = thread_stream.stream
        return get_state() if stream is None else stream.generator().get_state()

    def set_rng_state(new_state: Tensor) -> None:
        stream = thread_stream.stream
        if stream is None:
            set_state(new_state)
        else:
            stream.generator().set_state(new_state)

    for function, original in ((get_rng_state, get_state), (set_rng_state, set_state)):
        functools.update_wrapper(function, original)
        for module in (torch, torch.random):
            setattr(module, function.__name__, function)


def drawing_from(stream: RandomStream | None) -> contextlib.AbstractContextManager[None]:
    """A context in which this thread draws its CPU random numbers from the stream."""
    return _Drawing(stream)


class _Drawing:
    __slots__ = ("_before", "_stream")

    def __init__(self, stream: RandomStream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before, thread_stream.stream = thread_stream.stream, self._stream

    def __exit__(self, *error: object) -> None:
        thread_stream.stream = self._before


def _with_thread_stream(operator: str, position: int, keyword_only: bool) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(operator, "CPU")

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
