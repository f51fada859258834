"""Streams do their work in order and while the host goes on; events order them, and have times."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.accelerator import simulated
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


def test_streams_overlap(numbers):
    side = torch.Stream("sim")
    other = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    with closed_gate() as (gate, _):
        wait_at(numbers, gate)
        with side:
            assert (other + 1).tolist() == [2] * 4  # the default stream still waits
        assert not torch.accelerator.current_stream().query()


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


def test_the_pool_of_streams_wraps_round():
    streams = [torch.Stream("sim:1") for _ in range(33)]
    assert streams[32] == streams[0]
    assert len({stream.stream_id for stream in streams}) == 32


def test_each_thread_of_the_host_has_its_own_current_stream(numbers):
    with torch.Stream("sim") as side, ThreadPoolExecutor(1) as other:
        assert torch.accelerator.current_stream() == side
        assert other.submit(torch.accelerator.current_stream).result() != side


def test_what_is_asked_is_counted(numbers):
    simulated.reset_counts()
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        doubled = numbers * 2
    numbers.record_stream(side)
    side.synchronize()
    counts = simulated.counts()
    wanted = {
        "launches": 1,
        "allocations": 1,
        "events_made": 1,
        "events_recorded": 1,
        "stream_waits": 1,
        "record_streams": 1,
        "host_waits": 1,
    }
    assert counts == wanted
    assert simulated.host_waits() == {"stream.synchronize": 1}
    doubled[0].item()
    (doubled + 1).nonzero()
    assert simulated.host_waits() == {"stream.synchronize": 1, "item": 1, "aten::nonzero": 1}
