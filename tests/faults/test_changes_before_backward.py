"""What the user changes between the forward and the backward of a mini-batch."""

import copy

import pytest
import torch
from torch import nn

from pipework import Pipe

CHECKPOINT_MODES = ("never", "except_last", "always")


def in_two(*layers: nn.Module, checkpoint: str = "always") -> Pipe:
    return Pipe(nn.Sequential(*layers), 2, checkpoint, balance=[1, len(layers) - 1], devices=["cpu"] * 2)


@pytest.fixture
def pipe() -> Pipe:
    return in_two(nn.Linear(4, 4), nn.Linear(4, 4))


def test_a_parameter_that_was_replaced_stays_replaced(pipe: Pipe) -> None:
    x = torch.randn(4, 4)
    pipe(x).square().sum().backward()
    old, bias = pipe[0].weight, pipe[0].bias
    expected = old.grad
    pipe.zero_grad()
    loss = pipe(x).square().sum()
    pipe[0].weight = new = nn.Parameter(torch.zeros(4, 4))
    loss.backward()
    assert pipe[0].weight is new
    assert pipe[0].bias is bias
    assert new.grad is None
    assert torch.equal(old.grad, expected)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_an_input_that_was_overwritten_is_an_error(checkpoint: str) -> None:
    pipe, x = in_two(nn.Linear(4, 4), nn.Linear(4, 4), checkpoint=checkpoint), torch.randn(4, 4)
    loss = pipe(x).square().sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    pipe(x).square().sum().backward()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_parameter_that_was_changed_in_place_is_an_error(pipe: Pipe, layer: int) -> None:
    x = torch.randn(4, 4)
    loss = pipe(x).square().sum()
    with torch.no_grad():
        pipe[layer].weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    pipe(x).square().sum().backward()


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("evaluate", [nn.Module.eval, lambda pipe: pipe[2].eval()])
def test_evaluation_mode_is_not_the_recomputations(evaluate: object, checkpoint: str) -> None:
    pipe = in_two(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 4), checkpoint=checkpoint)
    x = torch.randn(8, 4)
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(pipe(x).square().sum())
    expected = torch.autograd.grad(losses[0], list(pipe.parameters()))
    evaluate(pipe)
    flags = [module.training for module in pipe.modules()]
    gradients = torch.autograd.grad(losses[1], list(pipe.parameters()))
    assert all(map(torch.equal, gradients, expected))
    assert [module.training for module in pipe.modules()] == flags


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_an_optimizer_step_between_two_backwards_is_an_error(checkpoint: str) -> None:
    pipe = in_two(nn.Linear(4, 4), nn.Linear(4, 4), checkpoint=checkpoint)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    loss = pipe(torch.randn(4, 4)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_optimizer_steps_between_mini_batches_are_well(checkpoint: str) -> None:
    pipe = in_two(nn.Linear(4, 4), nn.Linear(4, 4), checkpoint=checkpoint)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x = torch.randn(4, 4)
    for _ in range(3):
        loss = pipe(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        x.normal_()


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_layers_that_overwrite_the_input_themselves_are_well(checkpoint: str) -> None:
    plain = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
    pipe = in_two(*copy.deepcopy(plain), checkpoint=checkpoint)
    for _ in range(2):
        x = torch.randn(4, 4)
        plain(x.clone()).square().sum().backward()
        pipe(x).square().sum().backward()
    torch.testing.assert_close(pipe[1].weight.grad, plain[1].weight.grad)
