"""Tensors on the meta device get memory and give it back; more in `test_materialize.py`."""

import pytest
import torch
from torch import nn

from pipework.model.meta_memory import MetaMemory

CPU = torch.device("cpu")


def test_tied_tensors_get_memory_once_and_stay_tied() -> None:
    first, second = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")
    second.weight = first.weight
    memory = MetaMemory(nn.Sequential(first, second), CPU)
    assert len(memory.tensors) == 3
    assert second.weight is first.weight
    assert first.weight.device == CPU


def test_tensors_with_data_are_left_alone() -> None:
    layer = nn.Linear(2, 2)
    assert MetaMemory(layer, CPU).tensors == []


def test_floats_are_filled_when_no_number_is_missing() -> None:
    layer = nn.Linear(2, 2, bias=False, device="meta")
    memory = MetaMemory(layer, CPU)
    with torch.no_grad():
        layer.weight[0].fill_(1.0)
        assert memory.is_written(layer.weight)
        assert not memory.is_filled(layer.weight)
        layer.weight[1].fill_(1.0)
    assert memory.is_filled(layer.weight)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_of_integers_it_is_known_that_they_were_written(dtype: torch.dtype) -> None:
    layer = nn.Module()
    layer.register_buffer("mask", torch.ones(2, dtype=dtype, device="meta"))
    memory = MetaMemory(layer, CPU)
    assert not memory.is_filled(layer.mask)
    layer.mask.zero_()
    assert memory.is_filled(layer.mask)


def test_an_error_gives_back_what_was_given_before() -> None:
    layer = nn.Linear(2, 2, device="meta")
    layer.bias.register_hook(print)
    with pytest.raises(RuntimeError, match=r"'bias' lies on the meta device .* losing its hooks"):
        MetaMemory(layer, CPU)
    assert layer.weight.is_meta
