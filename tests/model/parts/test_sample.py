from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pipework import MicroBatches, NoChunk, torch_private
from pipework.model.parts.sample import LossPlace, arguments_of, few_rows, single_rows

X = torch.randn(8, 9)


def test_arguments_of_a_sample() -> None:
    given = MicroBatches([X, X + 1])
    assert arguments_of((given, NoChunk(X)))[0][0] is given[0]
    for value in (NoChunk(X), NoChunk([NoChunk(X)]), MicroBatches([{"a": NoChunk(X)}])):
        assert torch_private.pytree.tree_leaves(arguments_of({"x": value})[1]["x"])[0] is X


@pytest.mark.parametrize(("rows", "few"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 2), (8, 2)])
def test_few_rows_are_the_first_ones_together_and_alone(rows: int, few: int) -> None:
    mask = torch.eye(3)
    sample = {"x": X[:rows], "labels": [X[:rows, 0]], "mask": NoChunk(mask), "scale": 2.0}
    _, together = few_rows(sample)
    assert torch.equal(together["x"], X[:few])
    assert torch.equal(together["labels"][0], X[:few, 0])
    assert torch.equal(together["mask"], mask)
    assert together["scale"] == 2.0
    alone = single_rows(sample)
    assert torch.equal(torch.cat([keywords["x"] for _, keywords in alone]), X[:few])
    assert all(torch.equal(keywords["mask"], mask) for _, keywords in alone)


@pytest.mark.parametrize("sample", [(X, X[:3]), {"x": X, "step": torch.tensor(3)}, 5], ids=["unequal", "0-dim", "none"])
def test_what_is_not_split_stays_whole(sample: Any) -> None:
    arguments, keywords = few_rows(sample)
    expected = arguments_of(sample)
    assert all(
        a is b for a, b in zip((*arguments, *keywords.values()), (*expected[0], *expected[1].values()), strict=True)
    )
    with pytest.raises((TypeError, ValueError)):
        single_rows(sample)


def test_of_given_micro_batches_the_first_is_the_sample() -> None:
    given = MicroBatches([X, X + 1])
    assert few_rows({"x": given})[1]["x"] is given[0]
    assert single_rows({"x": given}) == []


class Named(NamedTuple):
    logits: Any
    loss: Any


@dataclass(frozen=True)
class Frozen:
    loss: Any
    logits: Any


LOSS = torch.tensor(2.0)


@pytest.mark.parametrize(
    "result", [LOSS, (LOSS, 1), {"loss": LOSS, 3: 1}, Named(1, LOSS), Frozen(LOSS, 1)], ids=lambda r: type(r).__name__
)
def test_the_loss_is_found_and_replaced(result: Any) -> None:
    place = LossPlace.in_result(result)
    assert place is not None
    assert place.read(result) is LOSS
    other = torch.tensor(3.0)
    changed = place.put(other, result)
    assert type(changed) is type(result)
    assert place.read(changed) is other
    assert place.read(result) is LOSS


@pytest.mark.parametrize("result", [None, torch.ones(2), torch.tensor(1), (), {"logits": LOSS}, Frozen(None, LOSS)])
def test_there_is_no_loss(result: Tensor | None) -> None:
    assert LossPlace.in_result(result) is None
