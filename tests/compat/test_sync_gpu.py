"""The old `Pipe` on accelerators, where its users had it; without one these tests are skipped."""

import pytest
import torch
from torch import nn

from pipework.compat.sync import Pipe, WithDevice

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("rpc")]


@pytest.fixture
def places() -> list[torch.device]:
    """The first accelerator and the last, which may be the same."""
    name, count = torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
    return [torch.device(name, 0), torch.device(name, count - 1)]


def test_layers_run_where_they_lie(places: list[torch.device], checkpoint: str) -> None:
    first, second = nn.Linear(16, 8).to(places[0]), nn.Linear(8, 4).to(places[1])
    pipe = Pipe(nn.Sequential(first, nn.ReLU(), second), 8, checkpoint)
    x = torch.rand(16, 16, device=places[0])
    output = pipe(x).local_value()
    assert output.device == places[1]
    torch.testing.assert_close(output, second(first(x).relu().to(places[1])))
    output.sum().backward()
    assert [parameter.grad.device for parameter in pipe.parameters()] == [places[0]] * 2 + [places[1]] * 2


def test_a_device_without_a_number_and_a_layer_on_the_cpu(places: list[torch.device]) -> None:
    with torch.accelerator.device_index(0):
        pipe = Pipe(nn.Sequential(nn.Linear(2, 2).to(places[0]), WithDevice(nn.ReLU(), places[0].type)))
    assert pipe.devices == [places[0]]  # the current one
    module = nn.Sequential(nn.Linear(2, 2).to(places[0]), WithDevice(nn.Tanh(), "cpu"), nn.Linear(2, 2).to(places[1]))
    pipe = Pipe(module, 2)
    assert pipe.devices == [places[0], torch.device("cpu"), places[1]]
    pipe(torch.rand(4, 2, device=places[0])).local_value().sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_with_device_may_share_nothing_with_another_device(places: list[torch.device]) -> None:
    if places[0] == places[1]:
        pytest.skip("needs two accelerators")
    one, other = nn.Linear(2, 2).to(places[0]), nn.Linear(2, 2)
    other.weight = one.weight
    with pytest.raises(ValueError, match="duplicate parameters on distinct devices"):
        Pipe(nn.Sequential(one, WithDevice(other, places[1])))
