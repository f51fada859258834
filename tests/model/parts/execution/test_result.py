from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pipework.model.parts.execution.result import LossPlace


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
