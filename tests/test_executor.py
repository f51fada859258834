"""What several calling threads share in an executor; layers without values; outputs that one rank cannot join."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Mesh, Pipe
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


class Uneven(nn.Module):
    """Returns another nesting for each micro-batch, so that outputs cannot be joined."""

    def forward(self, x: torch.Tensor) -> Any:
        return x if len(x) == 2 else [x]


class Dropped(nn.Module):
    """Draws random numbers in evaluation, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5)


def state_after_outputs_that_cannot_be_joined(mesh: Mesh) -> list[int]:
    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(Dropped(), Uneven()), 2, balance=[1, 1], mesh=mesh).eval()
    with contextlib.suppress(Exception), torch.no_grad():
        pipe(torch.ones(3, 1) if pipe.is_first else None)
    return torch.get_rng_state().tolist()


def test_an_error_after_the_workers_leaves_all_ranks_the_same_random_numbers(
    on_ranks: Callable[..., list[Any]],
) -> None:
    first, last = on_ranks(2, state_after_outputs_that_cannot_be_joined)
    assert first == last
    torch.manual_seed(0)
    assert first != torch.get_rng_state().tolist()
