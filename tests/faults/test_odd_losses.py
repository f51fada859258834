"""Losses and parameters that are not what the runtime may take for granted."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipework import Pipe
from pipework.testing import reference_step
from tests.helpers import in_threads


def pipe_of(loss_fn, checkpoint="never", schedule="1f1b", **options) -> Pipe:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return Pipe(
        module, 4, checkpoint, balance=[2, 1], devices=["cpu"] * 2, schedule=schedule, loss_fn=loss_fn, **options
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_loss_that_overwrites_its_target(schedule: str) -> None:
    def loss(output, target):
        return functional.mse_loss(output, target.mul_(3))

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = pipe_of(loss, schedule=schedule)
    pipe(x, target=y.clone()).backward()
    plain = nn.Sequential(*(layer for layer in pipe))
    expected = [parameter.grad.clone() for parameter in pipe.parameters()]
    plain.zero_grad()
    loss(plain(x), y.clone()).backward()
    for gradient, parameter in zip(expected, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_is_refused_where_the_target_is_needed_again() -> None:
    pipe = pipe_of(lambda output, target: functional.mse_loss(output, target.mul_(3)), "always", schedule="gpipe")
    with pytest.raises(RuntimeError, match=r"changed its target in place, .* Clone it in the loss"):
        pipe(torch.randn(8, 4), target=torch.randn(8, 4))


def test_a_complex_loss_is_refused() -> None:
    pipe = pipe_of(lambda output, target: torch.complex(output, target).sum())
    with pytest.raises(TypeError, match=r"complex loss \(torch.complex64\), wanted a real one"):
        pipe(torch.randn(8, 4), target=torch.randn(8, 4))


def test_a_hidden_parameter_of_the_loss_is_found() -> None:
    """Also after the loss was outside, and if the first micro-batch weighs nothing."""
    hidden = nn.Parameter(torch.ones(()))

    def loss(output, target):
        return functional.mse_loss(output, target) * hidden

    x, y = torch.randn(8, 4), torch.rand(8, 4)
    y[:2] = -1
    after = pipe_of(loss, schedule="gpipe")
    after(x).sum().backward()
    for pipe in (after, pipe_of(loss, loss_weight=lambda target: (target > 0).sum())):
        with pytest.raises(RuntimeError, match="without reading it from its module"):
            pipe(x, target=y)
    assert hidden.grad is None


def test_threads_that_share_deferred_batch_norms_take_turns() -> None:
    norm = nn.BatchNorm1d(4, momentum=None, dtype=torch.float64)
    pipe = Pipe(nn.Sequential(norm, nn.Tanh()), 4, "never", True, balance=[1, 1], devices=["cpu"] * 2)
    batches = [torch.randn(8, 4, dtype=torch.float64) + 10 * number for number in range(4)]

    def run(batch: torch.Tensor) -> None:
        for _ in range(25):
            pipe(batch)

    in_threads(*[functools.partial(run, batch) for batch in batches])
    assert int(pipe[0].num_batches_tracked) == 100
    expected = torch.stack([batch.mean(0) for batch in batches]).mean(0)
    torch.testing.assert_close(pipe[0].running_mean, expected)


class Momentum(nn.Module):
    """A loss whose buffer is a moving mean of the losses, by which it divides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.mse_loss(output, target)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(loss.detach() * 0.5)
        return loss / self.mean.clone()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_buffers_of_the_loss_count_once(schedule: str, checkpoint: str) -> None:
    torch.manual_seed(1)
    pipe = pipe_of(Momentum(), checkpoint, schedule)
    plain, loss_fn = copy.deepcopy(nn.Sequential(*pipe)), Momentum()
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    reference = reference_step(plain, x, y, loss_fn, chunks=4, key=0)
    loss = pipe(x, target=y)
    loss.backward()
    assert torch.equal(loss, reference.loss)
    for actual, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad)


def test_another_backward_within_a_hook_changes_nothing() -> None:
    pipe = pipe_of(functional.mse_loss)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe(x, target=y).backward()
    expected = [parameter.grad for parameter in pipe.parameters()]
    pipe.zero_grad()
    loss = pipe(x, target=y)
    parameters = list(pipe.parameters())

    def within(gradient: torch.Tensor) -> None:
        torch.autograd.grad(loss, parameters[:1], torch.tensor(5.0), retain_graph=True)

    parameters[-1].register_hook(within)
    loss.backward(retain_graph=True)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
