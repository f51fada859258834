from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from pipework.runtime.caller_context import CallerContext, Modes

SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


def test_what_a_new_thread_has_anyway_is_usual() -> None:
    assert CallerContext.capture(["cpu", "meta"]).is_usual


def test_autocast_is_off_in_a_backward_and_on_again_after_it() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = CallerContext.capture(["cpu"])
        with context.without_autocast():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


# Modes


def test_without_modes_there_is_nothing_to_enter() -> None:
    assert not Modes.capture()


def test_a_default_device_is_no_mode() -> None:
    with torch.device("meta"):
        assert not Modes.capture()
