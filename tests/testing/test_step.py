"""The reference with the loss inside."""

import pytest
import torch
from torch import Tensor, nn

from pipework.testing import reference_step


class WithLoss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_is_that_of_the_whole_mini_batch_up_to_rounding(reduction: str) -> None:
    layers, x, y = model(), torch.randn(7, 3), torch.randn(7, 2)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target, reduction=reduction)

    found = reference_step(layers, x, y, loss_fn, chunks=3, key=0, loss_reduction=reduction)
    torch.testing.assert_close(found.loss, loss_fn(layers(x), y).detach())
    torch.testing.assert_close(found.output, layers(x).detach())


def test_a_last_layer_with_the_loss() -> None:
    layers, x, y = model().append(WithLoss()), torch.randn(6, 3), torch.randn(6, 2)
    found = reference_step(layers, x, y, None, chunks=2, key=0)
    assert found.output is None
    torch.testing.assert_close(found.loss, nn.functional.mse_loss(layers[0](x), y).detach())


def test_a_micro_batch_of_weight_zero_counts_nothing() -> None:
    """Its loss is a mean over no element, hence NaN."""
    layers, x, y = model(), torch.randn(4, 3), torch.randn(4, 2)
    y[:2] = torch.nan

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target)[~target.isnan()].square().mean()

    found = reference_step(layers, x, y, loss_fn, 2, 0, loss_weight=lambda target: (~target.isnan()).sum())
    assert torch.equal(found.loss, nn.functional.mse_loss(layers(x[2:]), y[2:]).detach())
    assert layers[0].weight.grad is not None
    assert layers[0].weight.grad.isfinite().all()
