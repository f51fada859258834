"""The calling thread runs the one worker of a pipe on the CPU, and signal handlers do not interrupt it."""

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.runtime import calling_thread


class Calls(nn.Module):
    """Calls a function in each forward, and notes its thread forward and backward."""

    def __init__(self, function: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.function = function
        self.calls = 0
        self.threads: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        self.function()
        output = x * self.weight
        if output.requires_grad:
            output.register_hook(lambda _: self.threads.add(threading.current_thread().name))
        return output


def one_worker(layer: nn.Module, **options: Any) -> Pipe:
    return Pipe(nn.Sequential(layer), 4, devices=["cpu"], **options)


@pytest.fixture
def handler() -> Iterator[Callable[[Any], None]]:
    """Sets the handler of SIGINT until the end of the test."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda function: signal.signal(signal.SIGINT, function)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("inside", [True, False])
def test_layers_run_on_the_calling_thread(inside: bool) -> None:
    layer = Calls()
    pipe = one_worker(layer, loss_fn=nn.functional.mse_loss if inside else None)
    x = torch.ones(4, 2)
    (pipe(x, target=x) if inside else pipe(x).sum()).backward()
    with torch.no_grad():
        pipe(x)
    assert layer.threads == {threading.current_thread().name}


@pytest.mark.parametrize("setting", [
    lambda: torch.autocast("cpu"),
    lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
])  # fmt: skip
def test_settings_that_would_act_twice_have_a_thread_of_their_own(setting: Callable[[], Any]) -> None:
    layer = Calls()
    pipe = one_worker(layer)
    with setting():
        output = pipe(torch.ones(4, 2))
    output.sum().backward()
    assert "pipework worker 0" in layer.threads


def test_a_pipe_in_a_layer_of_a_pipe_has_its_own_thread() -> None:
    inner = Calls()
    pipe = one_worker(nn.Sequential(nn.Linear(2, 2), one_worker(inner)))
    pipe(torch.ones(4, 2)).sum().backward()
    assert inner.threads == {"pipework worker 0"}


def test_a_pipe_that_a_layer_of_its_own_calls_is_refused() -> None:
    layer = Calls()
    pipe = one_worker(layer)
    layer.function = lambda: pipe(torch.ones(4, 2))
    with pytest.raises(RuntimeError, match="has called that pipe"):
        pipe(torch.ones(4, 2))


def test_ctrl_c_ends_the_step_before_its_next_action(handler: Callable[[Any], None]) -> None:
    handler(signal.default_int_handler)
    layer = Calls(lambda: signal.raise_signal(signal.SIGINT) if layer.calls == 2 else None)
    pipe, weight, threads = one_worker(layer), layer.weight, torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        pipe(torch.ones(4, 2))
    assert layer.calls == 2
    assert layer.weight is weight
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    pipe(torch.ones(4, 2)).sum().backward()
    assert weight.grad is not None


def test_ctrl_c_in_the_backward_of_a_loss_outside(handler: Callable[[Any], None]) -> None:
    handler(signal.default_int_handler)

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            signal.raise_signal(signal.SIGINT)
            return gradients[0]

    class Layer(nn.Module):
        forward = staticmethod(Raises.apply)

    pipe = one_worker(nn.Sequential(nn.Linear(2, 2), Layer()))
    loss = pipe(torch.ones(4, 2)).sum()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert pipe[0][0].weight.grad is None


def test_a_handler_that_does_not_raise_is_called_at_once(handler: Callable[[Any], None]) -> None:
    seen: list[int] = []
    handler(lambda number, frame: seen.append(layer.calls))
    layer = Calls(lambda: signal.raise_signal(signal.SIGINT) if layer.calls == 2 else None)
    one_worker(layer)(torch.ones(4, 2))
    assert seen == [2]
    assert layer.calls == 4


def test_a_handler_that_a_layer_sets_stays(handler: Callable[[Any], None]) -> None:
    handler(signal.default_int_handler)
    mine: Callable[[int, object], None] = lambda number, frame: None  # noqa: E731
    one_worker(Calls(lambda: handler(mine)))(torch.ones(4, 2))
    assert signal.getsignal(signal.SIGINT) is mine


def test_another_thread_may_call() -> None:
    layer = Calls()
    thread = threading.Thread(target=lambda: one_worker(layer)(torch.ones(4, 2)).sum().backward(), name="caller")
    thread.start()
    thread.join()
    assert layer.threads == {"caller"}


def test_an_exception_of_the_job_does_not_leave_the_thread_marked() -> None:
    def fails() -> None:
        assert not calling_thread.is_free()
        raise ValueError("no job raises")

    with pytest.raises(ValueError, match="no job raises"):
        calling_thread.run_here(fails, pytest.fail)
    assert calling_thread.is_free()


def test_a_recomputation_within_inference_mode(handler: Callable[[Any], None]) -> None:
    pipe = one_worker(nn.Linear(2, 2), checkpoint="always")
    output = pipe(torch.ones(4, 2)).sum()
    with torch.inference_mode():
        output.backward()
    assert torch.equal(pipe[0].weight.grad, torch.full((2, 2), 4.0))


def test_a_handler_that_raises_while_handlers_are_put_back(
    handler: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler(signal.default_int_handler)
    raised = []

    class Signals:
        getsignal = staticmethod(signal.getsignal)

        @staticmethod
        def signal(number: int, function: Any) -> None:
            signal.signal(number, function)
            if function is signal.default_int_handler and not raised:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(calling_thread, "_signal", Signals)
    calling_thread.run_here(lambda: None, raised.append)
    assert [type(error) for error in raised] == [KeyboardInterrupt]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_process_that_a_layer_forks_has_handlers_that_raise(
    handler: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler(signal.default_int_handler)

    def as_in_a_child() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(calling_thread.os, "getpid", lambda: -1)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    calling_thread.run_here(as_in_a_child, pytest.fail)


@pytest.mark.filterwarnings("ignore")  # the compiler tells much of what it cannot trace
def test_torch_compile_around_the_caller_does_not_compile_the_worker() -> None:
    layer = Calls()
    pipe = one_worker(nn.Sequential(layer, nn.Dropout(0.5)), checkpoint="always")
    x = torch.ones(4, 64)
    results = []
    for call in (pipe, torch.compile(lambda x: pipe(x), backend="eager")):
        layer.threads.clear()
        torch.manual_seed(3)
        output = call(x)
        output.sum().backward()
        results.append(output.detach())
    assert torch.equal(*results)
    assert "pipework worker 0" in layer.threads
