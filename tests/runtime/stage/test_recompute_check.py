"""A recomputation that does not give the output of the first pass is an error."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.runtime.stage.recompute_check import MINI_BATCHES, RecomputeCheck


class Scaled(nn.Module):
    """Multiplies by a number that a function gives."""

    def __init__(self, factor: Callable[[], float | Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor()


def train(factor: Callable[[], float | Tensor], checkpoint: str = "except_last") -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Scaled(factor), nn.Tanh())
    pipe = Pipe(layers, 4, checkpoint, balance=[1, 2], devices=["cpu"] * 2)
    for _ in range(2):
        pipe(torch.randn(8, 4)).sum().backward()


def sources() -> dict[str, Callable[[], float | Tensor]]:
    own, count = torch.Generator(), iter(range(1, 1000))
    return {
        "random": random.random,
        "own generator": lambda: torch.rand((), generator=own),
        "counter": lambda: 1 + 0.1 * next(count),
    }


@pytest.mark.parametrize("source", sources())
def test_what_cannot_be_drawn_again_is_an_error_at_the_stage(source: str) -> None:
    with pytest.raises(RuntimeError, match=r"stage 1 \(layers '1' to '2'\) gave another output.*checkpoint='never'"):
        train(sources()[source])
    train(sources()[source], "never")


def test_what_both_passes_agree_on_is_none() -> None:
    train(lambda: torch.rand(()))
    train(lambda: float("nan"))
    train(lambda: float("inf"))


ONES = torch.tensor([1.0, 1e-6, torch.nan, torch.inf])


@pytest.mark.parametrize("values", [ONES, torch.complex(ONES[:2], ONES[:2]), torch.arange(3.0), torch.zeros(0)])
def test_rounding_is_none(values: Tensor) -> None:
    check = RecomputeCheck(iter([0]))
    check.keep(0, [values])
    check.compare(0, [values * (1 + 1e-6)], "stage 0")


@pytest.mark.parametrize("again", [torch.ones(3), torch.ones(2).double(), torch.tensor([1.0, 1.01])])
def test_other_values_shapes_and_dtypes_are_others(again: Tensor) -> None:
    check = RecomputeCheck(iter([0]))
    check.keep(1, [torch.ones(2)])
    check.compare(0, [again], "stage 0")
    with pytest.raises(RuntimeError, match="stage 0 gave another output"):
        check.compare(1, [again], "stage 0")


def test_only_the_first_micro_batch_of_some_mini_batches_is_kept() -> None:
    looks = iter(range(MINI_BATCHES))
    for mini_batch in range(MINI_BATCHES + 1):
        check = RecomputeCheck(looks)
        check.keep(0, [torch.zeros(2)])
        check.keep(1, [torch.zeros(2)])
        check.compare(1, [torch.ones(2)], "stage 0")
        if mini_batch == MINI_BATCHES:
            check.compare(0, [torch.ones(2)], "stage 0")
