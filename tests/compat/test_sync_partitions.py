"""Which layers form a partition, what that calls them, and which of them work together here."""

import pytest
import torch
from torch import nn

from pipework import PipeSequential, WithDevice
from pipework.assignment.partition import Machine
from pipework.compat.sync import Pipe, group

CPU, META = torch.device("cpu"), torch.device("meta")


def linear(device: torch.device = CPU) -> nn.Linear:
    """On a device of one's choice; the meta device stands for an accelerator, since it is there on every machine."""
    return nn.Linear(2, 2, device=device)


class Backwards(nn.Sequential):
    """Has a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def hooked(where: str) -> nn.Sequential:
    sequence = nn.Sequential(linear(), nn.ReLU())
    getattr(sequence, where)(lambda *_: None)
    return sequence


# Partitions, as the old names tell them


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        # Each layer on the CPU is one.
        ([linear(), nn.ReLU(), nn.Sequential(linear(), linear()), linear()], [(1, CPU), (1, CPU), (2, CPU), (1, CPU)]),
        # Consecutive layers on an accelerator are one.
        (
            [linear(META), nn.Sequential(linear(META), nn.ReLU()), linear(), linear(META), linear(META)],
            [(3, META), (1, CPU), (2, META)],
        ),
        # A layer without parameters is on the CPU, unless it is in `WithDevice`.
        ([linear(META), nn.ReLU(), linear(META)], [(1, META), (1, CPU), (1, META)]),
        ([linear(META), WithDevice(nn.ReLU(), "meta"), WithDevice(linear(), META)], [(3, META)]),
        # A nested sequence is opened once, if it only runs its layers.
        ([nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.ReLU())], [(2, CPU)]),
        ([PipeSequential(linear(), nn.ReLU())], [(2, CPU)]),
        ([Backwards(linear(), nn.ReLU())], [(1, CPU)]),
        ([hooked("register_forward_hook")], [(1, CPU)]),
        ([hooked("register_forward_pre_hook")], [(1, CPU)]),
        ([hooked("register_full_backward_hook")], [(1, CPU)]),
        ([hooked("register_full_backward_pre_hook")], [(1, CPU)]),
    ],
)
def test_partitions(layers: list[nn.Module], sizes: list[tuple[int, torch.device]]) -> None:
    assert [(len(each.layers), each.device) for each in group(nn.Sequential(*layers))] == sizes


# Workers


@pytest.mark.usefixtures("rpc")
def test_workers_on_the_cpu() -> None:
    layers = [WithDevice(linear(), "cpu"), nn.ReLU(), WithDevice(nn.Sequential(linear(), linear()), "cpu"), nn.Tanh()]
    assert list(Pipe(nn.Sequential(*layers))._pipe.balance) == [2, 1, 2]


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
    sequence, backwards, calls = nn.Sequential(linear(), nn.ReLU()), Backwards(linear(), nn.Tanh()), []
    sequence.register_forward_hook(lambda *_: calls.append(1))
    pipe, x = Pipe(nn.Sequential(sequence, backwards), chunks=2), torch.randn(4, 2)
    output = pipe(x).local_value()
    assert len(calls) == 2
    torch.testing.assert_close(output, backwards(sequence(x)))


@pytest.mark.usefixtures("rpc")
def test_what_lies_on_the_cpu_stays_there_on_a_machine_with_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: Machine((META, META), cores=8)))
    pipe = Pipe(nn.Sequential(*(linear() for _ in range(6))))
    assert pipe(torch.randn(4, 2)).local_value().device == CPU
    assert {parameter.device for parameter in pipe.parameters()} == {CPU}
