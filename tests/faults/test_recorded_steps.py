"""A recorded mini-batch must behave as any other: freed by reference count, and refused where PyTorch refuses it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn


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
