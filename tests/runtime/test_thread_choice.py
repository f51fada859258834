"""Threads or one thread: what was faster."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.runtime.thread_choice import RUNS, SMALL, ThreadChoice
from pipework.schedule import Action

ORDERS = ((Action("F", 0, 0), Action("B", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))


def after(runs: int, threads: float, one_thread: float, choice: ThreadChoice | None = None) -> ThreadChoice:
    """The choice after some runs, of which an action takes so many seconds in either way."""
    choice = choice or ThreadChoice(ORDERS)
    for _ in range(runs):
        choice.ran(4 * (one_thread if choice.one_thread else threads), one_thread=choice.one_thread)
    return choice


def test_long_actions_keep_their_threads() -> None:
    assert not any(after(runs, SMALL * 1.1, 0.0).one_thread for runs in range(100))


def test_both_ways_take_turns_until_each_has_run_often_enough() -> None:
    ways = [after(runs, 20e-6, 10e-6).one_thread for runs in range(3 + 3 * RUNS)]
    assert ways[: 3 + RUNS] == [False] * (3 + RUNS)
    assert ways[3 + RUNS : 3 + 3 * RUNS - 1] == [True, False] * (RUNS - 1) + [True]
    assert after(100, 20e-6, 10e-6).one_thread


def test_threads_that_are_faster_stay_and_are_compared_again_later() -> None:
    assert not any(after(runs, 10e-6, 20e-6).one_thread for runs in range(3 * RUNS + 3, 900))
    choice = after(900, 10e-6, 20e-6)
    assert after(200, 20e-6, 10e-6, choice).one_thread


def test_actions_that_have_grown_are_compared_again() -> None:
    choice = after(50, 20e-6, 10e-6)
    assert after(20, 30e-6, 15e-6, choice).one_thread
    assert not after(3 * RUNS, 1e-3, 2e-3, choice).one_thread


def test_a_run_that_was_made_in_another_way_does_not_count() -> None:
    choice = after(50, 20e-6, 10e-6)
    for _ in range(50):
        choice.ran(1.0, one_thread=False)
    assert choice.one_thread


class Threads(nn.Module):
    """Notes on which threads it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(threading.current_thread().name)
        return nn.functional.dropout(self.linear(x), 0.5, self.training)


def trained(steps: int, one_thread: bool | None) -> tuple[list[Tensor], list[set[str]]]:
    """The parameters after some steps, and the threads of the layers in the last one."""
    torch.manual_seed(0)
    layers = [Threads() for _ in range(4)]
    pipe = Pipe(
        nn.Sequential(*layers), 4, schedule="interleaved-1f1b", loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2,
        one_thread=one_thread,
    )  # fmt: skip
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    x = torch.randn(8, 4)
    for _ in range(steps):
        for layer in layers:
            layer.seen.clear()
        optimizer.zero_grad()
        pipe(x, target=x).backward()
        optimizer.step()
    return [parameter.detach() for parameter in pipe.parameters()], [layer.seen for layer in layers]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds that runs take: of those with threads as given, on one thread none."""

    def set_seconds(with_threads: float) -> None:
        class Choice(ThreadChoice):
            def ran(self, seconds: float, *, one_thread: bool) -> None:
                super().ran(0.0 if one_thread else with_threads, one_thread=one_thread)

        monkeypatch.setattr("pipework.runtime.engine.ThreadChoice", Choice)

    return set_seconds


def test_small_layers_move_to_the_calling_thread_and_compute_the_same(clock: Callable[[float], None]) -> None:
    clock(1e-6)
    parameters, threads = trained(30, None)
    expected, own_threads = trained(30, False)
    assert all(map(torch.equal, parameters, expected))
    assert threads == [{threading.current_thread().name}] * 4
    assert own_threads == [{"pipework worker 0"}, {"pipework worker 1"}] * 2


def test_large_layers_keep_their_threads(clock: Callable[[float], None]) -> None:
    clock(1.0)
    _, threads = trained(30, None)
    assert threads == [{"pipework worker 0"}, {"pipework worker 1"}] * 2
