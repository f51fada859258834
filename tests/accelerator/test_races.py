"""A missing wait, a missing record_stream and a stale read are reported; what is ordered is not."""

import pytest
import torch

from tests.accelerator import simulated
from tests.accelerator.gate import closed_gate, fail, wait_at

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


def test_a_missing_wait_is_reported_with_both_stacks(numbers):
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


def test_ordered_streams_reads_and_other_parts_do_not_race(numbers):
    side, event = torch.Stream("sim"), torch.Event("sim")
    with side:
        earlier_write(numbers)
        event.record()
    torch.accelerator.current_stream().wait_event(event)
    assert later_read(numbers).tolist() == [2] * 4
    with side:
        later_read(numbers)
        earlier_write(numbers[:2])
    later_read(numbers[2:])
    assert simulated.races() == []
    earlier_write(numbers[2:])
    assert "is not ordered after read by" in only(simulated.races())


@pytest.mark.parametrize("poison", [1, 2])
def test_a_missing_record_stream_is_reported_and_stale_reads_see_poison(poison):
    simulated.configure(poison=poison)
    side = torch.Stream("sim")
    x = torch.ones(1000, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with closed_gate() as (gate, opened):
        with side:
            wait_at(torch.zeros(1, device="sim"), gate)
            doubled = later_read(x)
        del x
        torch.accelerator.current_stream().synchronize()
        again = torch.full((1000,), 5.0, device="sim")
        torch.accelerator.current_stream().synchronize()
        opened.set()
    side.synchronize()
    del again
    assert not torch.equal(doubled.cpu(), torch.full((1000,), 2.0))
    assert "write by the next user of freed memory on sim:0 default stream is not ordered after read by aten::mul" in (
        "\n".join(simulated.races())
    )
    simulated.poison_reads()


def test_an_error_in_a_kernel_surfaces_at_the_next_wait():
    x = torch.zeros(4, device="sim")
    fail(x)
    y = x + 1
    with pytest.raises(RuntimeError, match=r"ran asynchronously on the simulated accelerator failed.*always fails"):
        torch.accelerator.synchronize()
    assert y.tolist() == [1] * 4  # and the device is still there
