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


def slow(width: int) -> nn.Sequential:
    """The first layer takes most of the time, and has most of the parameters."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Identity(), nn.Identity())


@pytest.mark.parametrize("by", ["balance_by_time", "balance_by_size"])
@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_a_balance_fits_the_module(adapter: Any, by: str, partitions: int) -> None:
    balance = getattr(adapter.module("balance"), by)
    counts = balance(partitions, slow(8), torch.ones(4, 8), device="cpu", **quickly(by))
    assert len(counts) == partitions
    assert sum(counts) == 4
    assert adapter.Pipe(slow(8), counts, devices=["cpu"] * 4).balance == counts


@pytest.mark.parametrize("by", ["balance_by_time", "balance_by_size"])
def test_what_costs_most_is_alone(adapter: Any, by: str) -> None:
    counts = getattr(adapter.module("balance"), by)(2, slow(512), torch.ones(256, 512), **quickly(by))
    assert counts == [1, 3]


@pytest.mark.parametrize("by", ["balance_by_time", "balance_by_size"])
def test_a_tuple_reaches_a_layer_as_one_argument(adapter: Any, by: str) -> None:
    balance: Callable[..., list[int]] = getattr(adapter.module("balance"), by)
    pair = (torch.ones(4, 2), torch.ones(4, 2, requires_grad=True))
    assert balance(2, nn.Sequential(Pair(), Pair()), pair, **quickly(by)) == [1, 1]


@pytest.mark.parametrize("by", ["balance_by_time", "balance_by_size"])
def test_a_layer_that_occurs_twice_counts_twice(adapter: Any, by: str) -> None:
    relu = nn.ReLU()
    module = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    assert sum(getattr(adapter.module("balance"), by)(2, module, torch.ones(4, 2), **quickly(by))) == 4


def quickly(by: str) -> dict[str, float]:
    return {"timeout": 0.05} if by == "balance_by_time" else {}


@pytest.mark.parametrize("by", ["balance_by_time", "balance_by_size"])
@pytest.mark.parametrize("partitions", [0, 5])
def test_the_number_of_partitions_is_checked(adapter: Any, by: str, partitions: int) -> None:
    with pytest.raises(ValueError, match="partitions"):
        getattr(adapter.module("balance"), by)(partitions, slow(2), torch.ones(4, 2))


def test_the_module_stays_as_it_was(adapter: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    adapter.module("balance").balance_by_time(2, module, torch.ones(4, 2), timeout=0.05)
    assert not any(each.training for each in module.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_parameters_without_gradients_only(adapter: Any) -> None:
    module = slow(2)
    module(torch.ones(4, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"^some parameter already has gradient"):
        adapter.module("balance").balance_by_time(2, module, torch.ones(4, 2))


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
