"""What several calling threads share in an executor; layers without values."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.runtime.step import Step


def two_stages() -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, balance=[1, 1], devices=["cpu", "cpu"])


def test_each_recorded_mini_batch_of_two_threads_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, x, errors = two_stages(), torch.ones(4, 2), []
    both = threading.Barrier(2, timeout=20)

    class Together(Step):
        def __init__(self, *args: Any, **options: Any) -> None:
            both.wait()  # as where the engine's lock is held by a third thread
            super().__init__(*args, **options)

    def call() -> None:
        try:
            pipe(x)
        except ValueError as error:
            errors.append(error)

    monkeypatch.setattr("pipework.executor.Step", Together)
    with pipe.record() as recording:
        threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert errors == []
    assert sorted(recording.steps) == [0, 1]


def test_layers_on_the_meta_device_have_a_loss_inside() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("meta")
    pipe = Pipe(layers, 2, devices=["meta"] * 2, schedule="1f1b", loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 2, device="meta")
    pipe(x, target=x).backward()
    assert [each.grad.device.type for each in pipe.parameters() if each.grad is not None] == ["meta"] * 4
