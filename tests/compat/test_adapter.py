"""Arguments as the old pipes check them."""

from typing import Any

import pytest
import torch
from torch import nn

from pipework.compat.adapter import (
    AdaptedPipe,
    checked_chunks,
    checked_mode,
    from_last_to_first,
    refuse_shared_parameters,
    refuse_unfit,
)
from pipework.schedule import fill_drain, split_at_loss, validate, with_recompute
from tests.schedule.orders_text import to_orders_text


@pytest.mark.parametrize("chunks", [3, "3", 3.7, torch.tensor(3)])
def test_chunks_are_what_int_takes(chunks: Any) -> None:
    assert checked_chunks(chunks) == 3


@pytest.mark.parametrize("chunks", [0, -1, "x"])
def test_other_chunks_are_refused(chunks: Any) -> None:
    with pytest.raises(ValueError, match=r"positive integer|invalid literal"):
        checked_chunks(chunks)


def test_modes() -> None:
    assert checked_mode("always") == "always"
    with pytest.raises(ValueError, match="checkpoint is not one of"):
        checked_mode("sometimes")


def test_modules_that_do_not_fit() -> None:
    layer = nn.ReLU()
    refuse_unfit(nn.Sequential(layer))
    with pytest.raises(TypeError, match=r"module must be nn.Sequential"):
        refuse_unfit(layer)
    with pytest.raises(ValueError, match="duplicate children"):
        refuse_unfit(nn.Sequential(layer, layer))


def test_a_parameter_may_be_shared_on_one_device_only() -> None:
    layer, devices = nn.Linear(1, 1), [torch.device("cpu"), torch.device("meta")]
    refuse_shared_parameters([(layer, devices[0])] * 2)
    with pytest.raises(ValueError, match="duplicate parameters on distinct devices"):
        refuse_shared_parameters(zip([layer, layer], devices, strict=True))


def test_the_output_of_one_micro_batch_is_a_copy() -> None:
    x = torch.ones(1, 2)
    AdaptedPipe(nn.Sequential(nn.Identity()), 1, "never", devices=["cpu"])(x).zero_()
    assert x.tolist() == [[1.0, 1.0]]


def test_backwards_go_from_the_last_micro_batch_to_the_first() -> None:
    schedule = from_last_to_first(with_recompute(fill_drain(2, 3), 2, loss_outside=True))
    assert to_orders_text(schedule).splitlines()[2:] == [
        "worker 0 0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0",
        "worker 1 1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0",
    ]
    for checkpointed in range(5):
        schedule = from_last_to_first(with_recompute(fill_drain(3, 4), checkpointed, loss_outside=True))
        assert validate(schedule, loss_outside=True).ok
        assert split_at_loss(schedule)
