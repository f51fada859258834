import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipework.attached import to_sequential
from pipework.model.parts.analysis.other_generators import generators_put_back


@pytest.mark.parametrize(
    ("draw", "names"),
    [(random.random, ["random"]), (np.random.rand, ["numpy.random"]), (float, [])],
    ids=["Python", "numpy", "none"],
)
def test_what_was_drawn_from_is_put_back_and_named(draw, names) -> None:
    random.seed(0)
    np.random.seed(0)
    expected = draw()
    random.seed(0)
    np.random.seed(0)
    with generators_put_back() as drawn:
        draw()
    assert drawn == names
    assert draw() == expected


class Blocks(nn.Module):
    """Does something between its blocks."""

    def __init__(self, between) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block, x)
        return x


def test_a_forward_that_draws_from_numpy_is_refused() -> None:
    model = Blocks(lambda block, x: block(x) * float(np.random.rand()))
    with pytest.raises(ValueError, match=r"Blocks's forward draws numbers from numpy\.random, outside of the units"):
        to_sequential(model, torch.ones(2, 4))


def test_a_forward_that_leaves_out_layers_at_random_is_refused() -> None:
    def between(block: nn.Module, x: Tensor, probability: float = 0.1) -> Tensor:
        return x if torch.rand([]) < probability else block(x)

    with pytest.raises(ValueError, match=r"decides with random numbers which units it calls \(blocks.0, blocks.1"):
        to_sequential(Blocks(between), torch.ones(2, 4))
    assert len(to_sequential(Blocks(lambda block, x: between(block, x, 0.0)), torch.ones(2, 4))) == 3
