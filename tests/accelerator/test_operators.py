"""Errors in kernels surface at the next wait, as on CUDA."""

import pytest
import torch
from torch import nn

from tests.accelerator import simulated
from tests.accelerator.gate import fail

pytestmark = pytest.mark.gpu


def test_an_error_in_a_kernel_surfaces_at_the_next_wait():
    x = torch.zeros(4, device="sim")
    fail(x)
    y = x + 1
    with pytest.raises(RuntimeError, match=r"ran asynchronously on the simulated accelerator failed.*always fails"):
        torch.accelerator.synchronize()
    assert y.tolist() == [1] * 4  # and the device is still there


def test_an_index_out_of_range_surfaces_at_the_next_wait():
    layer = nn.Embedding(4, 2, device="sim")
    looked_up = layer(torch.tensor([9], device="sim"))
    with pytest.raises(RuntimeError, match="index out of range"):
        looked_up.sum().item()
    simulated.poison_reads()  # of the sum
