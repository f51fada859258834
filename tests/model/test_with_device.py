"""`WithDevice` without a pipe; with one it is tested in `tests/assignment/test_partition.py`."""

import copy

import torch
from torch import nn

from pipework import WithDevice


def test_it_runs_the_layer_with_all_arguments() -> None:
    layer = nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 1, 4)
    wrapped = WithDevice(layer, "cpu")
    torch.testing.assert_close(wrapped(x, x, x, need_weights=False), layer(x, x, x, need_weights=False))


def test_it_keeps_the_device_as_given_and_moves_nothing() -> None:
    wrapped = copy.deepcopy(WithDevice(nn.Linear(1, 1), "meta"))
    assert wrapped.device == "meta"
    assert wrapped.module.weight.device.type == "cpu"
