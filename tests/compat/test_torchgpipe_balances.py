"""Automatic balance under its old names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Pair(nn.Module):
    """Takes and returns a pair of tensors."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = pair
        return a + b, b


@pytest.mark.parametrize("by", ["balance_by_time", "balance_by_size"])
def test_a_tuple_reaches_a_layer_as_one_argument(adapter: Any, by: str) -> None:
    balance: Callable[..., list[int]] = getattr(adapter.module("balance"), by)
    pair = (torch.ones(4, 2), torch.ones(4, 2, requires_grad=True))
    assert balance(2, nn.Sequential(Pair(), Pair()), pair, **quickly(by)) == [1, 1]


def quickly(by: str) -> dict[str, float]:
    return {"timeout": 0.05} if by == "balance_by_time" else {}


@pytest.mark.parametrize(
    ("costs", "blocks", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 2, [[1, 2, 3, 4], [5, 6]]),
        ([5, 1, 1], 3, [[5], [1], [1]]),
        ([0.5, 0.25], 1, [[0.5, 0.25]]),
    ],
)
def test_blocks(adapter: Any, costs: list[float], blocks: int, expected: list[list[float]]) -> None:
    solve = adapter.module("balance.blockpartition").solve
    assert solve(costs, blocks) == solve(costs, partitions=blocks) == expected
    assert solve(costs) == [costs]
    with pytest.raises(ValueError, match="partitions"):
        solve(costs, len(costs) + 1)
