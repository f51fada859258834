"""What a step does while it holds the engine's lock: another thread's step must not come in between."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework import Pipe
from pipework.autograd.weight_split.store import WeightGradientStore
from pipework.runtime.stage.memory_meter import MemoryMeter

X, Y = torch.ones(4, 2), torch.zeros(4, 2)


def two_stages(**options: Any) -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, balance=[1, 1], devices=["cpu", "cpu"], **options)


def test_what_a_step_has_learned_of_the_halves_is_noted_with_the_lock_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, held, learn = two_stages(schedule="zb-h1", loss_fn=F.mse_loss), [], WeightGradientStore.learn

    def noted(self: WeightGradientStore, *found: Any) -> None:
        held.append(pipe._executor.engine_in_use().lock.locked())
        learn(self, *found)

    monkeypatch.setattr(WeightGradientStore, "learn", noted)
    pipe(X, target=Y)
    assert held == [True, True]


def test_the_memory_meter_looks_for_parameters_and_buffers_with_the_lock_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, held = two_stages(), []

    class Noted(MemoryMeter):
        def __init__(self, persistent: list[torch.Tensor]) -> None:
            held.append(pipe._executor.engine_in_use().lock.locked())
            super().__init__(persistent)

    monkeypatch.setattr("pipework.runtime.step.MemoryMeter", Noted)
    with pipe.record():
        pipe(X)
    assert held == [True, True]
