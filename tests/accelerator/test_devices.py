"""Several devices, copies between them, and their generators."""

import pytest
import torch
from torch.nn import functional as F

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


def test_the_current_device():
    assert torch.ones(1, device="sim").device.index == 0
    with torch.accelerator.device_index(2):
        assert torch.ones(1, device="sim").device.index == 2


def test_tensors_of_different_devices_are_refused():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="sim:0") + torch.ones(2)


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


def test_a_copy_to_another_stream_than_the_current_one_is_not_ordered():
    x, side = torch.ones(4, device="sim:0"), torch.Stream("sim:1")
    with side:
        y = x.to("sim:1")
    y.add_(1)  # on the default stream
    torch.accelerator.synchronize(1)
    assert len(simulated.races()) == 1
    simulated.poison_reads()  # if the addition came first


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


def test_manual_seed_seeds_all_devices():
    torch.manual_seed(3)
    first = [torch.randn(8, device=index).cpu() for index in range(4)]
    torch.manual_seed(3)
    assert all(torch.equal(torch.randn(8, device=index).cpu(), first[index]) for index in range(4))


def test_a_generator_of_ones_own():
    generator = torch.Generator("sim:1").manual_seed(1)
    state = torch.sim.get_rng_state(1)
    first = torch.randn(8, device="sim:1", generator=generator)
    assert torch.equal(torch.sim.get_rng_state(1), state)
    assert torch.equal(torch.randn(8, device="sim:1", generator=generator.manual_seed(1)), first)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(8, device="sim:1", generator=torch.Generator())


def test_dropout_masks_are_those_of_the_seed_whatever_the_streams_do():
    x = torch.ones(1000, device="sim")
    torch.accelerator.synchronize()
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with closed_gate() as (gate, opened), torch.Stream("sim") as side:
            wait_at(torch.zeros(1, device="sim"), gate)
            masks.append(F.dropout(x, 0.3))  # the launch takes the numbers, not the kernel
            torch.rand(1000, device="sim")
            opened.set()
        side.synchronize()
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert {round(value, 3) for value in masks[0].tolist()} == {0.0, 1.429}
