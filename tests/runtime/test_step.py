"""What a step does while it holds the engine's lock: another thread's step must not come in between."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework import Pipe
from pipework.autograd.weight_split.store import WeightGradientStore
from pipework.runtime.stage.memory_meter import MemoryMeter


def test_halves_are_learned_and_parameters_looked_for_with_the_lock_held(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = Pipe(layers, 2, balance=[1, 1], devices=["cpu", "cpu"], schedule="zb-h1", loss_fn=F.mse_loss)
    held: list[tuple[str, bool]] = []

    def noted(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def call(self: Any, *given: Any) -> None:
            held.append((name, pipe._executor.engine_in_use().lock.locked()))
            function(self, *given)

        monkeypatch.setattr(owner, name, call)

    noted(MemoryMeter, "__init__")
    noted(WeightGradientStore, "learn")
    with pipe.record():
        pipe(torch.ones(4, 2), target=torch.zeros(4, 2))
    assert held == [("__init__", True)] * 2 + [("learn", True)] * 2
