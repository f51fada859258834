import math

import pytest
import torch
from torch import Tensor

from pipework.runtime.stage.loss import InnerLoss, mean_weights


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_weight_on_a_device_gives_the_bits_of_a_number(dtype: torch.dtype) -> None:
    counts = [7, 0, 1022, 3]
    on_device = InnerLoss(mean, weights=mean_weights(torch.tensor(counts)), micro_batches=4)
    on_host = InnerLoss(mean, weights=mean_weights(counts), micro_batches=4)
    for micro_batch, value in enumerate([1.1, math.nan, 0.7, -2.3]):
        results = []
        for inner in (on_device, on_host):
            leaf = torch.tensor(value, dtype=dtype, requires_grad=True)
            part = inner.part(leaf, micro_batch)
            if part.requires_grad:  # a number of 0 gives 0 without a graph, a tensor 0 or NaN times 0
                part.backward(torch.tensor(8.0, dtype=dtype))
            results.append([part.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.nan_to_num(0.0)])
        assert all(torch.equal(actual, expected) for actual, expected in zip(*results, strict=True))
        assert part.dtype is dtype
