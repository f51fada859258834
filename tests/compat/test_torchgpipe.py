"""What is peculiar to `GPipe`; the rest is in `tests/compat/test_torchgpipe_and_fairscale.py`."""

import pytest
import torch
from torch import nn

from pipework.compat.torchgpipe import GPipe, verify_module


def test_layers_that_share_a_parameter_are_refused() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    with pytest.raises(ValueError, match=r"^module with duplicate parameters in distinct children is not supported$"):
        GPipe(nn.Sequential(a, nn.ReLU(), b), [3], devices=["cpu"])


def test_verify_module() -> None:
    verify_module(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"must be nn\.Sequential"):
        verify_module(layer)
    with pytest.raises(ValueError, match="duplicate children"):
        verify_module(nn.Sequential(layer, layer))
    other.weight = layer.weight
    with pytest.raises(ValueError, match="duplicate parameters in distinct children"):
        verify_module(nn.Sequential(layer, other))


def test_a_parameter_may_occur_twice_within_a_layer() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layer[1].weight = layer[0].weight
    pipe = GPipe(nn.Sequential(layer, nn.ReLU()), [1, 1], devices=["cpu"] * 2, chunks=2)
    pipe(torch.ones(4, 2)).sum().backward()
    assert layer[0].weight.grad is not None


def test_its_text() -> None:
    assert repr(GPipe(nn.Sequential(nn.ReLU()), [1], devices=["cpu"])).startswith("GPipe(\n  (partitions): ModuleList(")
