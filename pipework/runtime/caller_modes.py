"""Modes of PyTorch: captured on the calling thread and entered on workers.

A mode sees every operator of its thread: `torch.utils.flop_counter.FlopCounterMode` counts them, debugging modes print
them, others replace them. Each thread has a stack of modes, so a mode of the caller would see nothing on a worker. The
settings of `caller_context` are always those around the forward. The modes in a backward are those around
`loss.backward()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipework import torch_private

if TYPE_CHECKING:
    import threading
    from contextlib import AbstractContextManager

    from torch.overrides import TorchFunctionMode

    from pipework.runtime.transport import Endpoint, Message, Receive
    from pipework.torch_private import TorchDispatchMode


class Modes(NamedTuple):
    """The modes of the thread that called `capture`, outermost first.

    Attributes:
        function: `TorchFunctionMode`s, which see calls of PyTorch's functions.
        dispatch: `TorchDispatchMode`s, which see the operators that those functions are made of.
    """

    function: tuple[TorchFunctionMode, ...]
    dispatch: tuple[TorchDispatchMode, ...]

    @classmethod
    def capture(cls) -> Modes:
        """Reads the current thread's modes. A default device, which is a mode too, belongs to `CallerContext`."""
        if not torch_private.any_modes():  # the usual case
            return cls((), ())
        return cls(tuple(torch_private.function_modes()), tuple(torch_private.dispatch_modes()))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.function or self.dispatch)

    def entered(self) -> AbstractContextManager[None]:
        """Puts the modes on the current thread's stacks."""
        return torch_private.modes_pushed(self.function, self.dispatch)


class TakingTurns:
    """An endpoint whose worker computes only while no other one does, and releases the lock while it waits.

    A mode is the user's object, written for one thread. A counter's sums are right only if one worker runs at a time.
    """

    __slots__ = ("_endpoint", "_turn", "finish", "handlers", "sender")

    def __init__(self, endpoint: Endpoint, turn: threading.Lock) -> None:
        self._endpoint = endpoint
        self._turn = turn
        self.sender = endpoint.sender
        self.handlers = endpoint.handlers
        self.finish = endpoint.finish

    def receiver(self, kind: str, stage: int) -> Receive:
        """See `Endpoint.receiver`."""
        receive, turn = self._endpoint.receiver(kind, stage), self._turn

        def taking_turns(micro_batch: int) -> Message:
            turn.release()
            try:
                return receive(micro_batch)
            finally:
                turn.acquire()

        return taking_turns
