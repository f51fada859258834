"""A recorded mini-batch must behave as any other: freed by reference count, and refused where PyTorch refuses it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe


class Remember(nn.Module):
    """Keeps weak references to the memory that its output, which tanh saves, lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        self.seen.append(weakref.ref(y.untyped_storage()))
        return y * 1.0


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("way", ["outside", "1f1b"], indirect=True)
def test_a_recorded_step_is_freed_without_the_garbage_collector(way: Any, checkpoint: str) -> None:
    remember = Remember()
    module = nn.Sequential(nn.Linear(4, 4), remember, nn.Linear(4, 4), nn.Tanh())
    pipe = way.pipe(module, 4, checkpoint, balance=[1, 1, 1, 1], share=True)
    x, y = torch.randn(8, 4), torch.randn(8)
    gc.collect()
    gc.disable()
    try:
        with pipe.record():
            way.loss(pipe, x, y).backward()
        assert len(remember.seen) >= 4
        assert not any(reference() is not None for reference in remember.seen)
    finally:
        gc.enable()


def test_an_overwritten_saved_tensor_is_refused_while_recorded_too() -> None:
    class Overwrite(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x)
            y.mul_(2)
            return y

    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), Overwrite()), 2, "never", balance=[1, 1], devices=["cpu"] * 2)
    with pipe.record(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pipe(torch.randn(4, 4)).sum().backward()
