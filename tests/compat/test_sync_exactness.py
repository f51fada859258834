"""Gradients are bitwise those of the un-pipelined model; backwards run from the last micro-batch to the first."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.compat.sync import Namespace, NoChunk, Pipe, PipeSequential, WithDevice
from pipework.testing import draw_key, micro_batch_random
from tests.compat.originals import Say
from tests.exactness.test_skips import WIDTH, Down, Up

pytestmark = pytest.mark.usefixtures("rpc")


def u_net() -> nn.Sequential:
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Down().isolate(outer), Down().isolate(inner), nn.Dropout(0.2), Up().isolate(inner), Up().isolate(outer)
    )


def drawing() -> nn.Sequential:
    norm = nn.Unflatten(1, (2, WIDTH // 2)), nn.BatchNorm1d(2), nn.Flatten()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), *norm, nn.Dropout(0.3))


def spreading() -> nn.Sequential:
    return PipeSequential(
        nn.Linear(WIDTH, WIDTH),
        Say(lambda x: (x, x.sin())),
        nn.Bilinear(WIDTH, WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, 2),
    )


def flat(module: nn.Sequential) -> nn.Sequential:
    """Every layer for itself."""
    return module


def nested(module: nn.Sequential) -> nn.Sequential:
    """The same layers in two nested sequences, where each layer has a worker of its own."""
    parts = PipeSequential(*module[:2]), PipeSequential(*module[2:])
    return nn.Sequential(*(WithDevice(part, "cpu") for part in parts))


def reference_backward(model: nn.Sequential, x: Tensor, chunks: int, key: int) -> Tensor:
    """Runs the plain model as the old library did: pieces of `torch.chunk`, and the last backward first."""
    outputs = []
    for micro_batch, rows in enumerate(x.chunk(chunks)):
        with micro_batch_random(model, key, micro_batch):
            outputs.append(model(rows))
    joined = torch.cat(outputs).detach().requires_grad_()
    joined.square().mean().backward()
    gradients = joined.grad.split([len(output) for output in outputs])
    for output, gradient in reversed(list(zip(outputs, gradients, strict=True))):
        output.backward(gradient)
    return joined.detach()


@pytest.mark.parametrize(("rows", "checkpoint"), [(8, "never"), (9, "except_last"), (2, "always"), (9, "always")])
@pytest.mark.parametrize("arrange", [flat, nested])
@pytest.mark.parametrize("model", [u_net, drawing, spreading])
def test_three_steps_are_bitwise_equal(model: Any, arrange: Any, rows: int, checkpoint: str) -> None:
    plain = model()
    pipe = Pipe(arrange(copy.deepcopy(plain)), 8 if rows == 9 else 4, checkpoint)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, pipe)]
    for step in range(3):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        of_pipe = x.detach().clone().requires_grad_()
        torch.manual_seed(step)
        expected = reference_backward(plain, x, pipe.chunks, draw_key())
        torch.manual_seed(step)
        output = pipe(of_pipe).local_value()
        output.square().mean().backward()
        assert torch.equal(output, expected)
        assert torch.equal(of_pipe.grad, x.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
            assert torch.equal(other, one)
    for one, other in zip(plain.buffers(), pipe.buffers(), strict=True):
        assert torch.equal(other, one)


def test_an_input_that_is_not_cut_gets_the_sum_of_its_gradients() -> None:
    x, whole = torch.randn(4, 2), torch.randn(1, 2, requires_grad=True)
    Pipe(nn.Sequential(Say(lambda x, whole: x * whole)), 2)(x, NoChunk(whole)).local_value().sum().backward()
    torch.testing.assert_close(whole.grad, x.sum(0, keepdim=True))
