"""Steps of a plan on copies."""

import threading
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework import Plan, plan
from pipework.planning import Rates
from pipework.planning import profile as measured_profile
from pipework.planning.measuring import plan_model
from pipework.planning.measuring.plan_model import by_speed
from pipework.planning.measuring.sample_batch import SampleBatch


class Noting(nn.Module):
    """Notes the threads that it runs on, also in copies."""

    threads: ClassVar[set[int]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.threads.add(threading.get_ident())
        return F.dropout(x, 0.5)


class Halving(nn.Linear):
    """Changes its parameter in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.data.mul_(0.5)
        return super().forward(x)


class Loss(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.mse_loss(output, target)


def layers_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3), Noting(), nn.Linear(4, 4))


def planned(module: nn.Sequential, x: torch.Tensor):
    rates = {"rated": Rates(1e9, 1e9)}
    estimated = measured_profile(module, x, target=x, loss_fn=F.mse_loss, rates=rates, workers=2)
    found = plan(estimated, devices=["rated"] * 2, schedules=["1f1b"], chunks=4, iterations=20)
    return replace(found, devices=("cpu", "cpu"), balance=(2, 2))


def batch_of(module: nn.Sequential, x: torch.Tensor, target: torch.Tensor | None, loss=None) -> SampleBatch:
    return SampleBatch.of(module, x, None, target, loss)


def test_a_trial_leaves_everything_as_it_is_and_the_simulated_step_takes_as_long() -> None:
    module, x, loss, lines = nn.Sequential(Halving(4, 4), *layers_of()[1:]).eval(), torch.randn(8, 3, 4), Loss(), []
    state = {name: value.clone() for name, value in module.state_dict().items()}
    found = planned(module, x)
    random = torch.get_rng_state()
    Noting.threads.clear()
    (tried,) = by_speed([found], module, batch_of(module, x, x, loss), 0, lines.append)
    assert f": {tried.seconds:.3g} s, median of 6 steps" in lines[-1]
    assert tried.seconds != found.seconds
    assert tried == replace(found, costs=tried.costs, notes=tried.notes)
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert loss.calls == 0
    assert threading.get_ident() not in Noting.threads  # workers ran, as in the pipe
    assert not any(layer.training for layer in module.modules())
    assert by_speed([found], module, batch_of(module, x, None), 0, print) == [found]  # without a target


class Failing(nn.Module):
    """Fails on the workers' threads, as if all that is left of the memory were enough for one stage."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise self.error
        return x


def test_too_little_memory_for_a_trial(recwarn: pytest.WarningsRecorder) -> None:
    x, lines = torch.randn(8, 3, 4), list[str]()
    error = torch.OutOfMemoryError("no memory")
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Failing(error), nn.Linear(4, 4))
    found = plan(
        module, x, target=x, loss_fn=F.mse_loss, devices=["cpu", "cpu"], iterations=4, timeout=0, progress=lines.append
    )
    assert sum("no memory for steps of the plan" in line for line in lines) == 1
    assert found.seconds > 0
    assert not recwarn.list


def test_a_plan_that_runs_out_of_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, lines = layers_of(), torch.randn(8, 3, 4), list[str]()
    first = planned(module, x)
    second = replace(first, balance=(1, 3))
    turns: Counter[tuple[int, ...]] = Counter()

    real = plan_model.run_steps

    def small(plan: Plan, *rest: Any) -> Any:
        turns[plan.balance] += 1
        if plan is first and turns[plan.balance] == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(plan, *rest)

    monkeypatch.setattr(plan_model, "run_steps", small)
    (found,) = by_speed([first, second], module, batch_of(module, x, x, F.mse_loss), 0, lines.append)
    assert found.balance == second.balance
    assert turns == {(2, 2): 2, (1, 3): 3}
    assert len([line for line in lines if "median of" in line]) == 1


def test_the_fastest_plan_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layers_of(), torch.randn(8, 3, 4)
    fast = planned(module, x)
    slow = replace(fast, balance=(1, 3))
    seconds = {fast.balance: 0.01, slow.balance: 0.1}
    monkeypatch.setattr(plan_model, "run_steps", lambda plan, *rest: [seconds[plan.balance]])
    found = by_speed([slow, fast], module, batch_of(module, x, x, F.mse_loss), 0, lambda line: None)
    assert [(plan.balance, pytest.approx(plan.seconds)) for plan in found] == [*seconds.items()]
    assert found[1].notes[-1].startswith("its step takes ")
