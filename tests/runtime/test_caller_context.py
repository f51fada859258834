import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from pipework.runtime.caller_context import CallerContext, allows_worker


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


def test_saved_tensor_hooks_see_what_another_thread_saves() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        context = CallerContext.capture([])

    def elsewhere() -> None:
        with context.entered():
            torch.ones(3, requires_grad=True).exp()

    on_a_new_thread(elsewhere)
    assert packed == [torch.Size([3])]


def test_autocast_is_off_in_a_backward_and_on_again_after_it() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = CallerContext.capture(["cpu"])
        with context.without_autocast():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("setting", [
    lambda: torch.autocast("cpu"),
    lambda: torch.device("meta"),
    lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
])  # fmt: skip
def test_no_worker_runs_where_a_setting_would_act_on_all_of_it(setting: Callable[[], Any]) -> None:
    assert allows_worker(in_backward=False)
    with setting():
        assert not allows_worker(in_backward=False)
    assert allows_worker(in_backward=True)


@pytest.mark.parametrize("setting", [torch.inference_mode, torch.autograd.detect_anomaly])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_no_worker_runs_in_a_backward_whose_settings_recomputations_would_have(setting: Callable[[], Any]) -> None:
    with setting():
        assert allows_worker(in_backward=False)
        assert not allows_worker(in_backward=True)


def test_no_worker_runs_in_a_backward_that_returns_some_gradients_only() -> None:
    x, seen = torch.ones(1, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda _: seen.append(allows_worker(in_backward=True)))
    torch.autograd.grad(y, x, retain_graph=True)
    y.backward()
    assert seen == [False, True]
