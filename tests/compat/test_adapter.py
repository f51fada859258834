"""What the adapters for the old pipes have in common."""

from typing import Any

import pytest
import torch

from pipework.compat.adapter import checked_chunks, from_last_to_first
from pipework.runtime.program import Program
from pipework.schedule import fill_drain, validate, with_recompute


@pytest.mark.parametrize("chunks", ["3", 3.7, torch.tensor(3)])
def test_chunks_are_what_int_takes(chunks: Any) -> None:
    assert checked_chunks(chunks) == 3


def test_backwards_go_from_the_last_micro_batch_to_the_first() -> None:
    schedule = from_last_to_first(with_recompute(fill_drain(2, 3), 2, loss_outside=True))
    assert [" ".join(map(str, order)) for order in schedule.orders] == [
        "0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0",
        "1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0",
    ]
    for checkpointed in range(5):
        schedule = from_last_to_first(with_recompute(fill_drain(3, 4), checkpointed, loss_outside=True))
        assert validate(schedule, loss_outside=True).ok
        assert Program(schedule).loss_may_be_outside
