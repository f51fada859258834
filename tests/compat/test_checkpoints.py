"""One function, checkpointed without a pipe, as torchgpipe and `torch.distributed.pipeline.sync` did."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.compat.sync.checkpoint import checkpoint, is_checkpointing, is_recomputing
from pipework.model import checkpoint as modes


def logged(library: Any, needs_gradient: bool) -> list[Any]:
    """What a layer with dropout sees in its two runs, and what comes out."""
    module = library.module("checkpoint")
    layer = nn.Linear(3, 3)
    seen: list[Any] = []

    def function(x: Tensor) -> Tensor:
        seen.append((module.is_checkpointing(), module.is_recomputing(), torch.is_grad_enabled()))
        return nn.functional.dropout(layer(x))

    torch.manual_seed(0)
    x = torch.ones(4, 3, requires_grad=needs_gradient)
    output = module.checkpoint(function, x)
    output.sum().backward()
    return [seen, output.tolist(), None if x.grad is None else x.grad.tolist(), layer.weight.grad.tolist()]


def of_a_pair(library: Any) -> list[Any]:
    """A tuple, and an output without a gradient."""
    pair = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    product, whole = library.module("checkpoint").checkpoint(lambda pair: (pair[0] * pair[1], pair[1].long()), pair)
    product.sum().backward()
    return [product.tolist(), whole.tolist(), pair[0].grad.tolist()]


@pytest.mark.parametrize("name", ["torchgpipe"], indirect=True)
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_it_is_that_of_torchgpipe(both: Callable[..., tuple[Any, Any]], needs_gradient: bool) -> None:
    there, here = both(logged, needs_gradient)
    assert here == there
    assert here[0] == [(True, False, False), (False, True, True)]


@pytest.mark.parametrize("name", ["torchgpipe"], indirect=True)
def test_a_tuple_is_one_argument(adapter: Any) -> None:
    assert of_a_pair(adapter) == [[3.0, 3.0], [3, 3], [3.0, 3.0]]


def test_a_tuple_becomes_arguments() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    checkpoint(torch.mul, (x, y)).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_both_runs_are_marked() -> None:
    seen = []

    def double(x: torch.Tensor, factor: int) -> torch.Tensor:
        seen.append((is_checkpointing(), is_recomputing()))
        return factor * x

    x = torch.ones(2, requires_grad=True)
    checkpoint(double, (x, 2)).sum().backward()
    assert seen == [(True, False), (False, True)]
    assert x.grad.tolist() == [2.0, 2.0]


def test_the_marks_are_those_of_pipes() -> None:
    assert is_checkpointing is modes.is_checkpointing
    assert is_recomputing is modes.is_recomputing


def test_without_gradients_there_is_one_run() -> None:
    seen = []
    with torch.no_grad():
        checkpoint(lambda x: (seen.append((is_checkpointing(), is_recomputing())), x)[1], torch.ones(1))
    assert seen == [(True, False)]
