"""Capturing modes, and workers that take turns."""

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pipework.runtime.caller_modes import Modes, TakingTurns


class Function(TorchFunctionMode):
    pass


class Dispatch(TorchDispatchMode):
    pass


def test_without_modes_there_is_nothing_to_enter() -> None:
    assert not Modes.capture()


def test_a_default_device_is_no_mode() -> None:
    with torch.device("meta"):
        assert not Modes.capture()


def test_modes_are_the_same_objects_on_another_thread_in_order_and_leave_nothing_there() -> None:
    stacks = []

    def elsewhere(modes: Modes) -> None:
        with modes.entered():
            stacks.append((_get_current_function_mode_stack(), _get_current_dispatch_mode_stack()))
        stacks.append((_get_current_function_mode_stack(), _get_current_dispatch_mode_stack()))

    outer, inner, dispatch = Function(), Function(), Dispatch()
    with outer, dispatch, inner:
        modes = Modes.capture()
    assert modes
    thread = threading.Thread(target=elsewhere, args=(modes,))
    thread.start()
    thread.join()
    assert stacks == [([outer, inner], [dispatch]), ([], [])]


def test_a_worker_that_waits_lets_others_compute() -> None:
    turn = threading.Lock()

    class Endpoint:
        handlers: Mapping[str, object] = MappingProxyType({})

        def sender(self, kind: str, stage: int) -> None: ...

        def finish(self) -> None: ...

        def receiver(self, kind: str, stage: int) -> Callable[[int], str]:
            def receive(micro_batch: int) -> str:
                assert not turn.locked()
                return "message"

            return receive

    endpoint = TakingTurns(Endpoint(), turn)
    with turn:
        assert endpoint.receiver("F", 0)(0) == "message"
        assert turn.locked()
