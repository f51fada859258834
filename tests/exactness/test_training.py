"""Ordinary training, in every way: accumulation, scaled losses, input gradients, evaluation in between, seeds."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe
from pipework.testing import draw_key, reference_step
from tests.ranks import held

INSIDE = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
WIDTH = 16


def drawing() -> nn.Sequential:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True, norm_first=True)

    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block(), nn.Dropout(0.5), block(), nn.Linear(WIDTH, 5))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4, WIDTH), torch.randn(rows)


def same_gradients(actual: Pipe, expected: nn.Module, factor: float = 1.0) -> bool:
    pairs = zip(actual.parameters(), held(expected, actual).parameters(), strict=True)
    return all(torch.equal(a.grad, e.grad * factor) for a, e in pairs)


def test_several_losses_may_be_under_way(way: Any, checkpoint: str) -> None:
    """The gradients of each are its own, whichever is differentiated first."""
    plain = drawing()
    pipe = way.pipe(plain, 3, checkpoint, balance=[2, 3])
    losses = []
    for step, rows in enumerate((6, 5)):
        x, y = batch(rows)
        torch.manual_seed(step)
        way.reference(plain, x, y, 3, draw_key())
        torch.manual_seed(step)
        losses.append(way.loss(pipe, x, y))
    losses[1].backward()
    losses[0].backward()
    for actual, expected in zip(pipe.parameters(), held(plain, pipe).parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad)  # a + b is b + a


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("probability", [0.5, 0.0])
def test_a_loss_that_draws_has_a_stream_of_its_own(way: Any, probability: float, checkpoint: str) -> None:
    """Whether or not layers draw, too."""

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return F.dropout(output - target, 0.5).square().mean()

    dropouts = [nn.Dropout(probability) for _ in range(2)]
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), dropouts[0], nn.Linear(WIDTH, 3), dropouts[1])
    pipe = way.pipe(plain, 3, checkpoint, balance=[1, 1, 1, 1], loss_fn=noisy)
    x, y = torch.randn(7, WIDTH), torch.randn(7, 3)
    for step in range(2):
        torch.manual_seed(step)
        reference = reference_step(plain, x, y, noisy, 3, draw_key())
        torch.manual_seed(step)
        loss = pipe(x, target=y)
        loss.backward()
        assert torch.equal(loss, reference.loss)
        assert same_gradients(pipe, plain)
