"""Losses on which `backward()` is never called."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipework import Pipe, PipeWarning
from pipework.autograd.nodes import FEW, UndeliveredLosses

X, Y = torch.ones(4, 4), torch.zeros(4, 4)


@pytest.fixture
def pipe() -> Pipe:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return Pipe(layers, 2, devices=["cpu", "cpu"], schedule="1f1b", loss_fn=nn.functional.mse_loss)


def test_losses_that_are_dropped_are_warned_of_once(pipe: Pipe) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(FEW):
        loss = pipe(X, target=Y)
        optimizer.step()
    del loss
    with pytest.warns(PipeWarning, match=r"^loss\.backward\(\) was called on none of the first 8 losses of this pipe"):
        pipe(X, target=Y)
    for _ in range(2 * FEW):
        pipe(X, target=Y)


@pytest.mark.parametrize("how", ["one backward", "added up", "no_grad", "eval", "frozen"])
def test_where_nothing_is_missing_there_is_no_warning(pipe: Pipe, how: str) -> None:
    pipe.train(how != "eval").requires_grad_(how != "frozen")
    losses = []
    with torch.set_grad_enabled(how != "no_grad"):
        for step in range(3 * FEW):
            loss = pipe(X, target=Y)
            if how == "one backward" and step == FEW - 1:
                loss.backward()
            if how == "added up":
                losses.append(loss)
    if losses:
        sum(losses).backward()


def test_a_backward_on_another_thread_may_settle_it_at_any_moment() -> None:
    class Begun:
        """A loss that is brought backward as soon as it can be."""

        def __setattr__(self, name: str, begun: Callable[[], None]) -> None:
            assert name == "begun"
            begun()

    losses = UndeliveredLosses()
    losses.add(Begun())  # type: ignore[arg-type]
    assert losses.doubts() == []
