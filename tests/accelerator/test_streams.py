"""Streams do their work in order and while the host goes on; events order them, and have times."""

import pytest
import torch

from tests.accelerator.gate import closed_gate, wait_at

pytestmark = pytest.mark.gpu


@pytest.fixture
def numbers() -> torch.Tensor:
    found = torch.zeros(4, device="sim")
    torch.accelerator.synchronize()
    return found


def test_the_host_goes_on_and_the_stream_keeps_the_order(numbers):
    stream = torch.accelerator.current_stream()
    with closed_gate() as (gate, opened):
        wait_at(numbers, gate)
        for _ in range(5):
            numbers.add_(1).mul_(2)
        assert not stream.query()
        opened.set()
        stream.synchronize()
        assert stream.query()
    assert numbers.tolist() == [62] * 4


def test_a_wait_is_for_the_record_that_was_there(numbers):
    first, second = torch.Stream("sim"), torch.Stream("sim")
    event = torch.Event("sim")
    second.wait_event(event)  # nobody has recorded it
    assert event.query()
    with closed_gate() as (gate, opened):
        with first:
            wait_at(numbers, gate)
            numbers.add_(1)
            event.record()
        second.wait_event(event)
        with closed_gate() as (later, _):
            with first:
                numbers.record_stream(first)
                wait_at(torch.zeros(4, device="sim"), later)
                event.record()
            assert not event.query()
            opened.set()
            with second:
                assert (numbers * 3).tolist() == [3] * 4  # although the second record is not passed


def test_the_host_waits_for_an_event(numbers):
    event = torch.Event("sim")
    with closed_gate() as (gate, opened):
        wait_at(numbers, gate)
        event.record()
        assert not event.query()
        opened.set()
        event.synchronize()
        assert event.query()


def test_the_time_between_events_is_that_of_the_work(numbers):
    start, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    start.record()
    with closed_gate() as (gate, opened):
        wait_at(numbers, gate)
        end.record()
        with pytest.raises(RuntimeError, match="must be completed"):
            start.elapsed_time(end)
        start.synchronize()
        opened.wait(0.01)
        opened.set()
    end.synchronize()
    assert start.elapsed_time(end) >= 10
    untimed = torch.Event("sim")
    untimed.record()
    untimed.synchronize()
    with pytest.raises(ValueError, match="enable_timing=True"):
        start.elapsed_time(untimed)
