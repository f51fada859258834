"""Several devices, copies between them, and their generators."""

import pytest
import torch

from tests.accelerator import simulated
from tests.accelerator.gate import closed_gate, wait_at

pytestmark = pytest.mark.gpu


def test_four_devices_or_as_many_as_asked_for():
    assert torch.accelerator.device_count() == 4
    assert [torch.ones(1, device=index).device.index for index in range(4)] == [0, 1, 2, 3]
    simulated.configure(devices=8)
    assert torch.ones(1, device="sim:7").device.index == 7
    simulated.configure(devices=1)
    with pytest.raises(RuntimeError, match="there is no device sim:1"):
        torch.ones(1, device="sim:1")
    with pytest.raises(ValueError, match="between 1 and 8, got 9"):
        simulated.configure(devices=9)


def test_a_copy_between_devices_is_ordered_on_both_sides():
    x, y = torch.zeros(4, device="sim:0"), torch.ones(4, device="sim:1")
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    with closed_gate() as (gate, opened), closed_gate() as (other, opened_other):
        wait_at(x, gate)
        x.add_(1)
        wait_at(y, other)
        y.copy_(x)  # after what the source's stream has, and what the target's stream has
        z = y * 3
        x.add_(1)
        opened.set()
        opened_other.set()
    assert z.tolist() == [3] * 4
    assert x.tolist() == [2] * 4
    assert simulated.races() == []


@pytest.mark.parametrize("device", [0, 3])
def test_each_device_has_a_generator(device):
    place = torch.device("sim", device)
    others = [torch.sim.get_rng_state(index) for index in range(4) if index != device]
    state = torch.sim.get_rng_state(place)
    with torch.accelerator.device_index(device):
        first = torch.rand(1000, device=place)
        assert not torch.equal(torch.sim.get_rng_state(place), state)
        torch.sim.set_rng_state(state, place)
        assert torch.equal(torch.rand(1000, device=place), first)
        torch.sim.manual_seed(5)
        assert torch.sim.default_generators[device].initial_seed() == 5
    assert 0.4 < first.mean().item() < 0.6
    left = [torch.sim.get_rng_state(index) for index in range(4) if index != device]
    assert all(map(torch.equal, others, left))
