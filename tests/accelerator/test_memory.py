"""Device memory has a limit and is counted; pinned memory is reused only after the copies from it."""

import pytest
import torch

from tests.accelerator import simulated
from tests.accelerator.gate import closed_gate, wait_at

pytestmark = pytest.mark.gpu

KIB = 1024


@pytest.fixture(autouse=True)
def empty():
    torch.accelerator.empty_cache()


def kib(count: int, device: int = 0) -> torch.Tensor:
    return torch.zeros(count * KIB, dtype=torch.uint8, device=f"sim:{device}")


def test_each_device_counts_its_memory():
    before = [torch.accelerator.memory_allocated(device) for device in range(2)]
    torch.accelerator.reset_peak_memory_stats(1)
    x = kib(3, device=1)
    y = kib(5, device=1)
    del x
    assert torch.accelerator.memory_allocated(1) - before[1] == 5 * KIB
    assert torch.accelerator.max_memory_allocated(1) - before[1] == 8 * KIB
    assert torch.sim.memory_allocated(1) == torch.accelerator.memory_allocated(1)
    assert torch.sim.max_memory_allocated("sim:1") == torch.accelerator.max_memory_allocated(1)
    assert torch.accelerator.memory_allocated(0) == before[0]
    reserved = torch.sim.memory_reserved(1)
    torch.accelerator.empty_cache()
    assert torch.sim.memory_reserved(1) == reserved - 3 * KIB
    del y


def test_beyond_the_limit_there_is_an_error_and_afterwards_all_goes_on():
    used = torch.sim.memory_reserved(0)
    simulated.configure(memory_limit=[used + 18 * KIB])
    held = [kib(4) for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError, match=r"sim out of memory\. Tried to allocate 8192 bytes"):
        kib(8)
    kib(8, device=1)  # has no limit
    held.pop()
    assert kib(8).sum().item() == 0  # the cache is emptied first
    assert torch.accelerator.get_memory_info(0)[1] == used + 18 * KIB


def test_copies_with_pinned_memory_do_not_wait():
    x = torch.arange(4.0).pin_memory()
    assert x.is_pinned()
    assert not torch.arange(4.0).is_pinned()
    target = torch.zeros(4, device="sim")
    back = torch.empty(4, pin_memory=True)
    torch.accelerator.synchronize()
    simulated.reset_counts()
    with closed_gate() as (gate, opened):
        wait_at(target, gate)
        target.copy_(x, non_blocking=True)
        back.copy_(target, non_blocking=True)
        assert simulated.host_waits() == {}
        opened.set()
    torch.accelerator.synchronize()
    assert back.tolist() == [0, 1, 2, 3]


def test_pinned_memory_that_a_copy_still_reads_is_not_reused():
    target = torch.zeros(1000, device="sim")
    torch.accelerator.synchronize()
    with closed_gate() as (gate, opened):
        x = torch.ones(1000, pin_memory=True)
        address = x.data_ptr()
        wait_at(target, gate)
        target.copy_(x, non_blocking=True)
        del x
        assert torch.empty(1000, pin_memory=True).data_ptr() != address
        opened.set()
    assert target.sum().item() == 1000
