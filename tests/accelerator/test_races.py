"""A missing wait, a missing record_stream and a stale read are reported; what is ordered is not."""

import pytest
import torch

from tests.accelerator import simulated
from tests.accelerator.gate import closed_gate, wait_at

pytestmark = pytest.mark.gpu


def earlier_write(x):
    x.add_(1)


def later_read(x):
    return x * 2


@pytest.fixture
def numbers():
    found = torch.zeros(4, device="sim")
    torch.accelerator.synchronize()
    return found


def only(reports):
    assert len(reports) == 1, "\n".join(reports)
    return reports[0]


@pytest.mark.parametrize("races", [1, 2])
def test_a_missing_wait_is_reported_with_both_stacks(numbers, races):
    simulated.configure(races=races)
    numbers.zero_()
    torch.accelerator.synchronize()
    with torch.Stream("sim"):
        earlier_write(numbers)
    later_read(numbers)
    report = only(simulated.races())
    first_line, rest = report.split("\n", 1)
    assert first_line.startswith("read by aten::mul")
    assert "is not ordered after write by aten::add.out on sim:0 stream" in first_line
    later, earlier = rest.split("  the earlier access:\n")
    assert "test_races.py" in later
    assert "in later_read" in later
    assert "earlier_write" not in later
    assert "in earlier_write" in earlier
    assert simulated.races() == []


@pytest.mark.parametrize("way", ["event", "stream", "host", "host event"])
def test_ordered_streams_do_not_race(numbers, way):
    side, event = torch.Stream("sim"), torch.Event("sim")
    with side:
        earlier_write(numbers)
        event.record()
    if way == "event":
        torch.accelerator.current_stream().wait_event(event)
    elif way == "stream":
        torch.accelerator.current_stream().wait_stream(side)
    elif way == "host":
        side.synchronize()
    else:
        event.synchronize()
    assert later_read(numbers).tolist() == [2] * 4
    assert simulated.races() == []


def test_an_event_that_was_recorded_too_early_does_not_order(numbers):
    side, event = torch.Stream("sim"), torch.Event("sim")
    with side:
        event.record()
        earlier_write(numbers)
    torch.accelerator.current_stream().wait_event(event)
    later_read(numbers)
    only(simulated.races())


def test_reads_do_not_race_with_reads_nor_parts_with_other_parts(numbers):
    with torch.Stream("sim"):
        later_read(numbers)
        earlier_write(numbers[:2])
    later_read(numbers[2:])
    assert simulated.races() == []
    earlier_write(numbers[2:])
    assert "is not ordered after read by" in only(simulated.races())


def freed_while_another_stream_reads(record):
    """What a stream made of a tensor that was freed before the stream came to it."""
    side = torch.Stream("sim")
    x = torch.ones(1000, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with closed_gate() as (gate, opened):
        with side:
            wait_at(torch.zeros(1, device="sim"), gate)
            doubled = x * 2
        if record:
            x.record_stream(side)
        del x
        torch.accelerator.current_stream().synchronize()
        again = torch.full((1000,), 5.0, device="sim")
        torch.accelerator.current_stream().synchronize()
        opened.set()
    side.synchronize()
    return doubled, again


@pytest.mark.parametrize("poison", [1, 2])
def test_a_missing_record_stream_is_reported_and_seen(poison):
    simulated.configure(poison=poison)
    doubled, _ = freed_while_another_stream_reads(record=False)
    assert not torch.equal(doubled.cpu(), torch.full((1000,), 2.0))
    assert "write by the next user of freed memory on sim:0 default stream is not ordered after read by aten::mul" in (
        "\n".join(simulated.races())
    )


def test_stale_reads_see_poison_and_are_reported():
    simulated.configure(poison=1)
    side = torch.Stream("sim")
    x = torch.ones(1000, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with closed_gate() as (gate, opened):
        with side:
            wait_at(torch.zeros(1, device="sim"), gate)
            doubled = later_read(x)
        del x
        torch.accelerator.current_stream().synchronize()
        opened.set()
    side.synchronize()
    report = only(simulated.poison_reads())
    assert "aten::mul" in report
    assert "in later_read" in report
    assert simulated.races() != []
    assert doubled.isnan().all()
    assert len(simulated.poison_reads()) == 1  # the line above
