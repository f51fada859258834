import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pipework.runtime.caller_context import CallerContext, Modes


def on_a_new_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.get_default_device(),
    )


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_new_thread_gets_the_callers_settings(name: str) -> None:
    with SETTINGS[name]():
        context, here = CallerContext.capture(["cpu"]), settings()

    def elsewhere() -> tuple[Any, ...]:
        before = settings()
        with context.entered():
            inside = settings()
        assert settings() == before
        return inside

    assert not context.is_usual
    assert on_a_new_thread(elsewhere) == here


def test_what_a_new_thread_has_anyway_is_usual() -> None:
    assert CallerContext.capture(["cpu", "meta"]).is_usual


def test_autocast_is_off_in_a_backward_and_on_again_after_it() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = CallerContext.capture(["cpu"])
        with context.without_autocast():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


# Modes


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
