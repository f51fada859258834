"""The reference: its gradients, with the loss outside and inside, and the random numbers that the model draws."""

import pytest
import torch
from torch import Tensor, nn

from pipework.testing import micro_batch_random, reference_backward, reference_step
from pipework.testing.reference import gradients_added, micro_batches


@pytest.mark.parametrize(("rows", "chunks", "sizes"), [(9, 4, [3, 2, 2, 2]), (2, 4, [1, 1]), (8, 1, [8]), (0, 3, [0])])
def test_micro_batches_are_those_of_a_pipe(rows: int, chunks: int, sizes: list[int]) -> None:
    pieces = micro_batches((torch.arange(rows), torch.zeros(rows, 2)), chunks)
    assert [len(first) for first, _ in pieces] == [len(second) for _, second in pieces] == sizes


def test_gradients_are_those_of_the_whole_mini_batch_up_to_rounding() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(7, 3, requires_grad=True)
    found = reference_backward(model, x, lambda output: output.square().mean(), chunks=3, key=0)
    gradients = [p.grad for p in (*model.parameters(), x)]
    for tensor in (*model.parameters(), x):
        tensor.grad = None
    loss = model(x).square().mean()
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    torch.testing.assert_close(found.output, model(x).detach())
    torch.testing.assert_close(gradients, [p.grad for p in (*model.parameters(), x)])


def test_former_gradients_are_added_at_the_end() -> None:
    layer = nn.Linear(1, 1)
    layer.weight.grad = torch.ones(1, 1)
    with gradients_added(layer):
        assert layer.weight.grad is None
        layer.weight.grad = torch.full((1, 1), 2.0)
    assert layer.weight.grad.item() == 3.0
    with gradients_added(layer):
        pass
    assert layer.weight.grad.item() == 3.0
    assert layer.bias.grad is None


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


def outputs(model: nn.Sequential, key: int, micro_batch: int) -> Tensor:
    with micro_batch_random(model, key, micro_batch):
        output: Tensor = model(torch.ones(2, 64))
    return output


def test_key_and_micro_batch_determine_the_numbers() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    first = outputs(model, 1, 0)
    assert torch.equal(outputs(model, 1, 0), first)
    assert not torch.equal(outputs(model, 1, 1), first)
    assert not torch.equal(outputs(model, 2, 0), first)


def test_a_layer_at_two_places_draws_twice() -> None:
    dropout = nn.Dropout(0.5)
    twice = outputs(nn.Sequential(dropout, dropout), 1, 0)
    assert torch.equal(twice, outputs(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), 1, 0))
    assert not torch.equal(2 * outputs(nn.Sequential(dropout), 1, 0), twice)


def test_the_generator_and_the_hooks_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(64, 2), nn.Dropout(0.5))
    before = torch.get_rng_state()
    outputs(model, 1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)
