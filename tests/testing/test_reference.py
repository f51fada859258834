"""The reference with the loss outside."""

import pytest
import torch
from torch import nn

from pipework.testing import reference_backward
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
