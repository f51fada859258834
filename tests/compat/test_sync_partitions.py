"""Which layers form a partition, what that calls them, and which of them work together here."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from pipework import PipeSequential, WithDevice
from pipework.assignment.devices import Machine
from pipework.compat.sync import Group, Pipe, group

CPU, META = torch.device("cpu"), torch.device("meta")


class Linear(nn.Linear):
    """On a device of one's choice; the meta device stands for an accelerator, since it is there on every machine."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(2, 2, device=device)


class Backwards(nn.Sequential):
    """Has a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def hooked(where: str) -> nn.Sequential:
    sequence = nn.Sequential(Linear(), nn.ReLU())
    getattr(sequence, where)(lambda *_: None)
    return sequence


def sizes(groups: Sequence[Group]) -> list[tuple[int, torch.device]]:
    """The number of layers of each group, and its device."""
    return [(len(each.layers), each.device) for each in groups]


# Partitions, as the old names tell them


def test_every_layer_on_the_cpu_is_a_partition() -> None:
    module = nn.Sequential(Linear(), nn.ReLU(), nn.Sequential(Linear(), Linear()), Linear())
    assert sizes(group(module)) == [(1, CPU), (1, CPU), (2, CPU), (1, CPU)]


def test_consecutive_layers_on_the_same_accelerator_are_one_partition() -> None:
    module = nn.Sequential(Linear(META), nn.Sequential(Linear(META), nn.ReLU()), Linear(), Linear(META), Linear(META))
    assert sizes(group(module)) == [(3, META), (1, CPU), (2, META)]


def test_layers_without_parameters_count_as_on_the_cpu() -> None:
    assert sizes(group(nn.Sequential(Linear(META), nn.ReLU(), Linear(META)))) == [(1, META), (1, CPU), (1, META)]


def test_with_device_groups_a_layer() -> None:
    layer = Linear()
    groups = group(nn.Sequential(Linear(META), WithDevice(nn.ReLU(), "meta"), WithDevice(layer, META)))
    assert sizes(groups) == [(3, META)]
    assert groups[0].layers[2].module is layer


def test_a_nested_sequence_is_flattened_once() -> None:
    inner = nn.Sequential(Linear(), nn.ReLU())
    (only,) = group(nn.Sequential(nn.Sequential(inner, nn.ReLU())))
    assert only.layers[0] is inner
    (spread,) = group(nn.Sequential(PipeSequential(Linear(), nn.ReLU())))
    assert len(spread.layers) == 2


@pytest.mark.parametrize(
    "sequence",
    [
        Backwards(Linear(), nn.ReLU()),
        hooked("register_forward_hook"),
        hooked("register_forward_pre_hook"),
        hooked("register_full_backward_hook"),
        hooked("register_full_backward_pre_hook"),
    ],
    ids=["own forward", "forward hook", "forward pre-hook", "backward hook", "backward pre-hook"],
)
def test_a_nested_sequence_that_does_more_is_kept_whole(sequence: nn.Sequential) -> None:
    (only,) = group(nn.Sequential(sequence))
    assert only.layers == [sequence]


# Workers


@pytest.mark.usefixtures("rpc")
@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ([nn.Sequential(Linear(), nn.ReLU()), nn.Sequential(Linear())], [2, 1]),  # nested sequences are a worker each
        ([WithDevice(Linear(), "cpu"), nn.ReLU(), WithDevice(Linear(), "cpu")], [2, 1]),
        ([WithDevice(nn.Sequential(Linear(), Linear()), "cpu"), nn.Sequential(Linear(), nn.ReLU())], [1, 3]),
    ],
)
def test_workers_on_the_cpu(layers: list[nn.Module], wanted: list[int]) -> None:
    assert list(Pipe(nn.Sequential(*layers))._pipe.balance) == wanted


# Under Pipe


@pytest.mark.usefixtures("rpc")
def test_names_of_parameters_and_buffers() -> None:
    module = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2, affine=False)),
        nn.Tanh(),
        nn.Sequential(nn.Sequential(nn.RMSNorm(2))),
        Backwards(nn.Tanh(), nn.RMSNorm(2)),
    )
    pipe = Pipe(module, chunks=2)
    assert list(pipe.state_dict()) == [
        "partitions.0.0.weight",
        "partitions.0.0.bias",
        "partitions.0.2.running_mean",
        "partitions.0.2.running_var",
        "partitions.0.2.num_batches_tracked",
        "partitions.2.0.0.weight",
        "partitions.3.0.1.weight",
    ]
    assert pipe.devices == [CPU] * 4
    x = torch.randn(6, 2)
    expected = nn.Sequential(*module).eval()(x)
    torch.testing.assert_close(pipe.eval()(x).local_value(), expected)


@pytest.mark.usefixtures("rpc")
def test_hooks_and_own_forwards_of_nested_sequences_run() -> None:
    sequence, backwards, calls = nn.Sequential(Linear(), nn.ReLU()), Backwards(Linear(), nn.Tanh()), []
    sequence.register_forward_hook(lambda *_: calls.append(1))
    pipe, x = Pipe(nn.Sequential(sequence, backwards), chunks=2), torch.randn(4, 2)
    output = pipe(x).local_value()
    assert len(calls) == 2
    torch.testing.assert_close(output, backwards(sequence(x)))


@pytest.mark.usefixtures("rpc")
def test_what_lies_on_the_cpu_stays_there_on_a_machine_with_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: Machine((META, META), cores=8)))
    pipe = Pipe(nn.Sequential(*(Linear() for _ in range(6))))
    assert pipe(torch.randn(4, 2)).local_value().device == CPU
    assert {parameter.device for parameter in pipe.parameters()} == {CPU}
