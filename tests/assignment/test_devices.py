"""The devices that a process can use, as users name them."""

import pytest
import torch

from pipework.assignment.devices import Machine, checked_devices, default_devices

CPU = torch.device("cpu")
NONE = Machine(cores=8)
TWO = Machine((torch.device("cuda", 0), torch.device("cuda", 1)), cores=2)


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda:1"), torch.device("cuda", 1)])
def test_every_spelling_of_an_accelerator(device):
    assert checked_devices([device, "cpu"], TWO) == [torch.device("cuda:1"), CPU]


def test_no_index_means_the_current_accelerator():
    machine = Machine(TWO.accelerators, current=1)
    assert checked_devices(["cuda", 0], machine) == [torch.device("cuda:1"), torch.device("cuda:0")]


@pytest.mark.parametrize(
    ("device", "machine", "error", "message"),
    [
        (0, NONE, ValueError, r"devices\[1\] is 0, the index of an accelerator, but no accelerator is available"),
        (2, TWO, ValueError, r"devices\[1\] is 2, .* only cuda:0, cuda:1 and 'cpu' are available"),
        (-1, TWO, ValueError, r"devices\[1\] is -1"),
        ("cuda", NONE, ValueError, r"devices\[1\] is 'cuda', but no accelerator is available: use 'cpu'"),
        ("cuda:5", TWO, ValueError, r"devices\[1\] is 'cuda:5', but only cuda:0, cuda:1"),
        ("mps", TWO, ValueError, r"devices\[1\] is 'mps', but only cuda:0, cuda:1"),
        ("gpu", NONE, ValueError, r"devices\[1\] is 'gpu', which PyTorch does not know"),
        (1.0, TWO, TypeError, r"devices\[1\] must be .* got 1.0"),
        (True, TWO, TypeError, r"devices\[1\] must be .* got True"),
        (None, TWO, TypeError, r"devices\[1\] must be .* got None"),
    ],
)
def test_a_device_that_cannot_be_used(device, machine, error, message):
    with pytest.raises(error, match=message):
        checked_devices(["cpu", device], machine)


@pytest.mark.parametrize("devices", ["cpu", 2, CPU])
def test_a_device_where_a_list_is_wanted(devices):
    with pytest.raises(TypeError, match=r"devices must be a list with the device of each partition, got .*: write"):
        checked_devices(devices, NONE)


def test_knows_this_machine():
    machine = Machine.here()
    assert machine.cores >= 1
    assert len(machine.accelerators) == torch.accelerator.device_count()


@pytest.mark.parametrize(("exactly", "count"), [(True, 6), (False, 4)])
def test_cpu_workers_are_as_many_as_wanted_or_as_suit_the_cores(exactly, count):
    assert default_devices(6, exactly, NONE) == [CPU] * count
    assert default_devices(6, exactly, TWO) == list(TWO.accelerators)
