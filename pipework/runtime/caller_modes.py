"""The modes that whoever calls the pipe has entered, entered again on its workers.

A mode sees every operator of its thread: `torch.utils.flop_counter.FlopCounterMode` counts them, debugging modes print
them, others replace them. Stacks of modes belong to a thread, so on a worker nothing would be seen. Unlike the context
of the forward (see `context`), modes are those of whoever calls: in the backward those around `loss.backward()`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import overrides
from torch.utils import _python_dispatch as dispatch
from torch.utils._device import DeviceContext

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from pipework.runtime.transport import Endpoint, Message


@dataclass(frozen=True)
class Modes:
    """The modes of the thread that called `capture`, outermost first.

    Attributes:
        function: `TorchFunctionMode`s, which see calls of PyTorch's functions.
        dispatch: `TorchDispatchMode`s, which see the operators that those functions are made of.
    """

    function: tuple[overrides.TorchFunctionMode, ...]
    dispatch: tuple[dispatch.TorchDispatchMode, ...]

    @classmethod
    def capture(cls) -> Modes:
        """Reads the current thread's modes. A default device, which is a mode too, belongs to `CallerContext`."""
        function = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        return cls(
            tuple([mode for mode in function if type(mode) is not DeviceContext]),
            tuple(dispatch._get_current_dispatch_mode_stack()),
        )

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.function or self.dispatch)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Puts the modes on the current thread's stacks.

        They are not entered with `with`: to the mode nothing begins here, and a counter would start from zero.
        """
        with contextlib.ExitStack() as stack:
            for function_mode in self.function:
                overrides._push_mode(function_mode)  # type: ignore[no-untyped-call]
                stack.callback(overrides._pop_mode)
            for dispatch_mode in self.dispatch:
                dispatch._push_mode(dispatch_mode)
                stack.callback(dispatch._pop_mode, _dispatch_key(dispatch_mode))
            yield


class TakingTurns:
    """An endpoint whose worker computes only while no other one does; it lets the others go ahead while it waits.

    A mode is an object of the user's that was written for one thread. With modes around, one worker at a time is what
    keeps a counter's sums right.

    Args:
        endpoint: does the work.
        turn: held by the worker that computes.
    """

    __slots__ = ("_endpoint", "_turn", "finish", "handlers", "sender")

    def __init__(self, endpoint: Endpoint, turn: threading.Lock) -> None:
        self._endpoint = endpoint
        self._turn = turn
        self.sender = endpoint.sender
        self.handlers = endpoint.handlers
        self.finish = endpoint.finish

    def receive(self, address: Any) -> Message:
        """See `Endpoint.receive`."""
        self._turn.release()
        try:
            return self._endpoint.receive(address)
        finally:
            self._turn.acquire()


def _dispatch_key(mode: dispatch.TorchDispatchMode) -> Any:
    """What PyTorch pops this mode by: most have none of their own, its infrastructure's have."""
    return getattr(mode, "_dispatch_key", None) or getattr(mode, "_mode_key", None)
