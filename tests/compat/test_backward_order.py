"""Backwards from the last micro-batch to the first."""

from pipework.compat.backward_order import from_last_to_first
from pipework.schedule import fill_drain, split_at_loss, validate, with_recompute
from tests.schedule.orders_text import to_orders_text


def test_each_recomputation_stays_before_its_backward() -> None:
    schedule = from_last_to_first(with_recompute(fill_drain(2, 3), 2, loss_outside=True))
    assert to_orders_text(schedule).splitlines()[2:] == [
        "worker 0 0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0",
        "worker 1 1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0",
    ]


def test_it_can_be_executed_with_the_loss_outside() -> None:
    for checkpointed in range(5):
        schedule = from_last_to_first(with_recompute(fill_drain(3, 4), checkpointed, loss_outside=True))
        assert validate(schedule, loss_outside=True).ok
        assert split_at_loss(schedule)
