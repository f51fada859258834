"""A forward that takes another way than for the sample, and so reads what was not sent, is an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import attach


class Model(nn.Module):
    """Reads what its first unit gave once more at its end, if a flag says so or the data does.

    Args:
        reads: computes with what the first unit gave.
    """

    def __init__(self, reads: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.reads = reads
        self.late = False
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        first = hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        if self.late or bool((x > 2).any()):
            hidden = self.reads(hidden, first)
        return nn.functional.mse_loss(self.head(hidden), labels)


def in_place(hidden: Tensor, first: Tensor) -> Tensor:
    return (hidden * 2).add_(first)


WAYS = {
    "an operator": lambda hidden, first: hidden.masked_fill(first > 0, 0.0),
    "in place": in_place,
    "a number": lambda hidden, first: hidden * (1.0 if first.sum() > 0 else 2.0),
    "at the end": lambda hidden, first: hidden.where(first.isnan(), hidden),
}


def batch(largest: float = 1.0) -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, largest, 32).view(8, 4), "labels": torch.linspace(1, -1, 32).view(8, 4)}


def with_pipe(way: str) -> Model:
    model = Model(WAYS[way])
    attach(model, batch(), chunks=4, balance=[3, 2], devices=["cpu"] * 2)
    return model


@pytest.mark.parametrize("way", WAYS)
def test_data_that_takes_another_way(way: str) -> None:
    model = with_pipe(way)
    model(**batch()).backward()
    with pytest.raises(RuntimeError, match="reads a tensor that it did not read for the sample"):
        model(**batch(3.0))
    model(**batch()).backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_flag_that_is_switched_later(way: str) -> None:
    model = with_pipe(way)
    for _ in range(5):  # after so many micro-batches, few are watched
        model(**batch()).backward()
    model.late = True
    with pytest.raises(RuntimeError, match="reads a tensor that it did not read for the sample"):
        model(**batch())


@pytest.mark.parametrize("way", WAYS)
def test_a_sample_that_takes_the_way(way: str) -> None:
    model = Model(WAYS[way])
    model.late = True
    attach(model, batch(), chunks=4, balance=[3, 2], devices=["cpu"] * 2)
    loss = model(**batch())
    pieces = zip(batch()["x"].chunk(4), batch()["labels"].chunk(4), strict=True)
    del model.forward
    assert torch.equal(loss, torch.stack([model(*piece) for piece in pieces]).mean())
