import re
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipework.assignment.partition import (
    Machine,
    Partitioning,
    checked_balance,
    checked_devices,
    choose_partitioning,
    default_devices,
    estimated_costs,
    partition_model,
    split_layers,
)
from pipework.model.sequential import WithDevice

CPU, META = torch.device("cpu"), torch.device("meta")
ONE, TWO, THREE = (Machine(tuple(torch.device("cuda", i) for i in range(count)), cores=2) for count in (1, 2, 3))
NONE = Machine(cores=8)


def linears(*widths, device="cpu"):
    """Layers of growing cost: widths are output features of a one-feature input, so that costs are easy to see."""
    return nn.Sequential(*(nn.Linear(1, width, bias=False, device=device) for width in widths))


class Lies(nn.ReLU):
    """Has parameters on devices that this machine need not have."""

    def __init__(self, *devices):
        super().__init__()
        self.places = [torch.device(device) for device in devices]

    def parameters(self, recurse=True):
        return (SimpleNamespace(device=place, numel=lambda: 1) for place in self.places)


def chosen(module, balance=None, devices=None, machine=NONE):
    partitioning = choose_partitioning(module, balance, devices, machine=machine)
    return list(partitioning.balance), [str(device) for device in partitioning.devices]


class TestGiven:
    @pytest.mark.parametrize(
        ("module", "options", "expected"),
        [
            (linears(1, 1, 1), {"balance": [1, 2], "devices": ["cpu", "meta"]}, ([1, 2], ["cpu", "meta"])),
            (linears(1, 1, 1), {"balance": [1, 2], "devices": ["cpu", "meta", "cpu"]}, ([1, 2], ["cpu", "meta"])),
            (linears(1, 1, 1, 1), {"balance": [2, 1, 1]}, ([2, 1, 1], ["cpu"] * 3)),
            (linears(1, 1, 1, 1), {"balance": [2, 2], "machine": THREE}, ([2, 2], ["cuda:0", "cuda:1"])),
            (linears(1, 2, 3, 4, 5, 6), {"devices": ["cpu", "meta"]}, ([4, 2], ["cpu", "meta"])),
            (linears(1, 1), {"devices": ["cpu"] * 3}, ([1, 1], ["cpu"] * 2)),
            (nn.Sequential(nn.Linear(1, 1), *linears(1, device="meta")), {"devices": ["meta"]}, ([2], ["meta"])),
            (nn.Sequential(*linears(1), nn.Sequential(*linears(1, 1))), {"balance": [1, 1]}, ([1, 1], ["cpu"] * 2)),
        ],
    )
    def test_is_taken(self, module, options, expected):
        assert chosen(module, **options) == expected

    @pytest.mark.parametrize(
        ("options", "numbers"),
        [
            ({"balance": [1, 1], "devices": ["cpu"]}, r"devices: 1, partitions: 2\): give 2 devices"),
            ({"balance": [1, 1], "devices": []}, "devices: 0, partitions: 2"),
            ({"balance": [1, 1], "machine": ONE}, "devices: 1, partitions: 2"),
            ({"devices": []}, "devices: 0, partitions: 1"),
        ],
    )
    def test_too_few_devices(self, options, numbers):
        with pytest.raises(IndexError, match=rf"^too few devices to hold given partitions \({numbers}"):
            chosen(linears(1, 1), **options)


class TestLayersOnDevices:
    @pytest.mark.parametrize(
        ("layers", "machine", "expected"),
        [
            ([*linears(1, 1), Lies("cuda:1"), *linears(1)], NONE, ([2, 1, 1], ["cpu", "cuda:1", "cpu"])),
            # Layers without parameters stay with their neighbour, and layers on meta lie nowhere.
            (
                [nn.Flatten(), *linears(1), nn.ReLU(), Lies("cuda:1"), nn.BatchNorm1d(1, affine=False)],
                NONE,
                ([3, 2], ["cpu", "cuda:1"]),
            ),
            (
                [*linears(1, device="meta"), Lies("cuda:0"), *linears(1, device="meta"), Lies("cuda:1")],
                TWO,
                ([3, 1], ["cuda:0", "cuda:1"]),
            ),
            ([*linears(1, device="meta"), *linears(1)], NONE, ([1, 1], ["cpu", "cpu"])),
            (
                [*linears(1), WithDevice(nn.ReLU(), "meta"), nn.ReLU(), WithDevice(linears(1), CPU)],
                NONE,
                ([1, 2, 1], ["cpu", "meta", "cpu"]),
            ),
            # Consecutive layers on an accelerator are a partition, and each WithDevice on the CPU is a worker.
            (
                [WithDevice(nn.ReLU(), 1), WithDevice(nn.ReLU(), "cuda:1"), WithDevice(nn.ReLU(), "cuda:0")],
                TWO,
                ([2, 1], ["cuda:1", "cuda:0"]),
            ),
            (
                [nn.ReLU(), WithDevice(nn.ReLU(), "cpu"), *linears(1), WithDevice(nn.ReLU(), "cpu")],
                NONE,
                ([3, 1], ["cpu", "cpu"]),
            ),
        ],
    )
    def test_they_stay_where_they_are(self, layers, machine, expected):
        assert chosen(nn.Sequential(*layers), machine=machine) == expected

    def test_with_device_must_name_a_usable_device_and_agree_with_devices(self):
        with pytest.raises(ValueError, match="WithDevice of layer 1 is 'cuda:7'"):
            chosen(nn.Sequential(nn.ReLU(), WithDevice(nn.ReLU(), "cuda:7")), machine=TWO)
        module = nn.Sequential(WithDevice(nn.ReLU(), "cpu"), nn.ReLU())
        assert chosen(module, [1, 1], ["cpu", "meta"]) == ([1, 1], ["cpu", "meta"])
        with pytest.raises(ValueError, match=r"layer 0 is wrapped in WithDevice for 'cpu', but .* put it on 'meta'"):
            chosen(module, [1, 1], ["meta", "cpu"])


class TestPipeworkChooses:
    @pytest.mark.parametrize(
        ("layers", "machine", "devices"),
        [
            (6, THREE, ["cuda:0", "cuda:1", "cuda:2"]),
            (2, THREE, ["cuda:0", "cuda:1"]),
            (6, ONE, ["cuda:0"]),
            (6, Machine(cores=1), ["cpu"] * 2),
            (6, Machine(cores=6), ["cpu"] * 3),
            (6, Machine(cores=64), ["cpu"] * 4),
            (3, Machine(cores=64), ["cpu"] * 3),
            (1, Machine(cores=64), ["cpu"]),
        ],
    )
    def test_accelerators_or_cpu_workers(self, layers, machine, devices):
        balance, got = chosen(linears(*[4] * layers), machine=machine)
        assert got == devices
        assert sum(balance) == layers


class TestModule:
    @pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]), "model", None])
    def test_only_sequential(self, module):
        with pytest.raises(TypeError, match=r"^module must be nn\.Sequential to be partitioned, got .*: write nn"):
            chosen(module)

    @pytest.mark.parametrize("options", [{}, {"balance": [1], "devices": ["cpu"]}])
    def test_a_layer_on_several_devices(self, options):
        layer = Lies("cpu", "cuda:0")
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole text is compared below
            chosen(nn.Sequential(layer), **options)
        assert str(caught.value) == (
            f"nn.Module: {layer}, should have all parameters on a single device, "
            "please use .to() to place the module on a single device"
        )


class TestSplitLayers:
    def test_objects_names_and_flags_stay_and_wrappers_go(self):
        norm, relu = nn.BatchNorm1d(3, affine=False), nn.ReLU()
        shared = nn.Linear(2, 3)
        module = nn.Sequential(
            OrderedDict(
                chunks=shared, devices=norm, wrapped=WithDevice(relu, "cpu"), last=nn.Linear(3, 2), again=shared
            )
        )
        layers, parameters = [shared, norm, relu, module[3], shared], list(module.parameters())
        norm.eval()
        first, second, third = split_layers(module, Partitioning((1, 2, 2), (CPU, META, CPU)))
        assert [type(part) for part in (first, second)] == [nn.Sequential] * 2
        assert [name for part in (first, second, third) for name, _ in part.named_children()] == [*module._modules]
        assert all(a is b for a, b in zip(layers, [*first, *second, *third], strict=True))
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
        assert norm.running_mean.device == META  # layers without parameters are moved, too
        assert [second.training, norm.training, relu.training] == [True, False, True]
        assert not split_layers(nn.Sequential(relu).eval(), Partitioning((1,), (CPU,)))[0].training
        assert split_layers(nn.Sequential(), choose_partitioning(nn.Sequential(), None, None)) == []

    @pytest.mark.gpu
    def test_an_optimizer_made_before_still_works(self):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        parameters = list(module.parameters())
        split_layers(module, choose_partitioning(module, [1, 1], ["cpu", 0]))
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
        assert [parameter.device.type for parameter in parameters[::2]] == [
            "cpu",
            torch.accelerator.current_accelerator().type,
        ]

    @pytest.mark.gpu
    def test_what_is_shared_goes_to_the_first_partition(self):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].weight = module[0].weight
        split_layers(module, choose_partitioning(module, [1, 1], ["cpu", 0]))
        assert module[0].weight is module[1].weight
        assert module[0].weight.device == CPU
        assert module[1].bias.device.type != "cpu"


class TestPartitionModel:
    def test_partitions_in_order_on_their_devices(self):
        module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        x = torch.rand(4, 2)
        expected = module(x)
        model = partition_model(module, [2, 1], ["cpu", "cpu"])
        assert [len(part) for part in model] == [2, 1]
        assert list(model.state_dict()) == ["0.0.weight", "0.0.bias", "1.2.weight", "1.2.bias"]
        assert torch.equal(model(x), expected)
        moved = partition_model(linears(1, 1), [1, 1], ["cpu", "meta"])
        assert [parameter.device for parameter in moved.parameters()] == [CPU, META]


# The devices that a process can use, as users name them


def test_every_spelling_of_an_accelerator():
    machine = Machine(TWO.accelerators, current=1)
    for device in (1, "cuda:1", torch.device("cuda:1"), torch.device("cuda", 1), "cuda"):
        assert checked_devices([device, 0, "cpu"], machine) == [torch.device("cuda:1"), torch.device("cuda:0"), CPU]
    assert default_devices(6, True, NONE) == [CPU] * 6


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


# The number of layers of each partition, and what layers cost


@pytest.mark.parametrize("balance", [[1, 2], (1, 2), torch.tensor([1, 2])])
def test_integers_of_any_make_that_sum_to_the_layers(balance):
    assert checked_balance(balance, 3) == [1, 2]


@pytest.mark.parametrize(
    "balance", [[], [3, 1], [1, 1], [0, 3], [-1, 4], [1.0, 2.0], [True, 2], ["3"], [1, 1, 1, 1], [None, 3]]
)
def test_the_error_says_the_right_sum_and_shows_a_line_that_runs(balance):
    with pytest.raises(ValueError, match="positive integers that sum to 3") as caught:
        checked_balance(balance, 3)
    assert str(balance) in str(caught.value)
    names = {"module": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU()), "sample": torch.rand(2, 2)}
    for line in re.findall(r"^    (.*)$", str(caught.value), re.MULTILINE):
        exec(line.replace("sample)", "sample, timeout=0)"), names)
    assert sum(names["balance"]) == 3


@pytest.mark.parametrize("balance", [2, "auto", b"12", 1.5])
def test_a_balance_that_is_no_list(balance):
    with pytest.raises(TypeError, match=rf"positive integers that sum to 5, the number of layers, got {balance!r}"):
        checked_balance(balance, 5)


def test_a_layer_costs_the_elements_that_take_part_in_arithmetic():
    block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    layer, embedding, attention = nn.Linear(2, 2), nn.Embedding(10, 4), nn.MultiheadAttention(4, 1)
    output = nn.Linear(4, 10, bias=False)
    output.weight = embedding.weight  # a tied weight costs where it is multiplied
    costs = {nn.Embedding(1000, 4): 1, block: 41 + 1 + 37, nn.Conv2d(2, 3, 5): 3 * 2 * 25 + 3 + 1, nn.Identity(): 1,
             layer: 7, embedding: 1, output: 41, attention: 81}  # fmt: skip
    assert estimated_costs(nn.Sequential(*costs, layer)) == [*costs.values(), 7]
    with pytest.raises(ValueError, match=r"'1.weight' is lazy and has no shape yet: run one batch"):
        estimated_costs(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))
