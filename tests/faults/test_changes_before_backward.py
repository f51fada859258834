"""What the user changes between the forward and the backward of a mini-batch."""

import pytest
import torch
from torch import Tensor, nn

from pipework import MicroBatches, NoChunk, Pipe


def in_two(*layers: nn.Module, checkpoint: str = "always") -> Pipe:
    return Pipe(nn.Sequential(*layers), 2, checkpoint, balance=[1, len(layers) - 1], devices=["cpu"] * 2)


def test_a_parameter_that_was_replaced_stays_replaced() -> None:
    pipe = in_two(nn.Linear(4, 4), nn.Linear(4, 4))
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


@pytest.mark.parametrize("changed", ["input", "parameter"])
def test_an_input_or_a_parameter_that_was_overwritten_is_an_error(checkpoint: str, changed: str) -> None:
    pipe, x = in_two(nn.Linear(4, 4), nn.Linear(4, 4), checkpoint=checkpoint), torch.randn(4, 4)
    loss = pipe(x).square().sum()
    if changed == "parameter":  # also between two backwards, as by an optimizer
        loss.backward(retain_graph=True)
    with torch.no_grad():
        (x if changed == "input" else pipe[1].weight).mul_(3)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    pipe(x).square().sum().backward()


class SquareAndAdd(nn.Module):
    """Needs the values of its first input in the backward, and those of the second one not."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.square() + y


def given(tensor: Tensor) -> MicroBatches:
    return MicroBatches([tensor[:2], tensor[2:]])


INPUTS = {
    "split": lambda x, y: (x, y),
    "whole": lambda x, y: (NoChunk(x[0]), y),
    "given": lambda x, y: (given(x), given(y)),
    "one given": lambda x, y: (MicroBatches([x]), MicroBatches([y])),
    "given to all": lambda x, y: (NoChunk(x[0]), given(y)),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("changed", [0, 1])
def test_only_an_input_whose_values_are_needed_may_not_change(inputs: str, changed: int) -> None:
    pipe = in_two(SquareAndAdd(), nn.Linear(3, 4), checkpoint="never")
    leaf = torch.randn(4, 3, requires_grad=True)
    x, y = leaf * 2, torch.randn(4, 3)
    output = pipe(*INPUTS[inputs](x, y))
    loss = sum(part.sum() for part in output) if isinstance(output, MicroBatches) else output.sum()
    (x if changed == 0 else y).detach().zero_()
    if changed == 0:
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()
    else:
        loss.backward(retain_graph=True)
        loss.backward()
        assert leaf.grad is not None


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
