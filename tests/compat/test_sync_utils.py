import pytest
import torch
from torch import nn

from pipework.compat.sync import Pipe, partition_model


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def test_layers_are_grouped_and_counted_from_0_in_each_partition() -> None:
    module = layers(3)
    partitions = partition_model(module, [2, 1], ["cpu", "meta"])
    assert [list(partition) for partition in partitions] == [[module[0], module[1]], [module[2]]]
    assert list(partitions.state_dict())[-1] == "1.0.bias"
    assert [partition[0].weight.device.type for partition in partitions] == ["cpu", "meta"]


@pytest.mark.usefixtures("rpc")
def test_a_pipe_has_the_partitions_as_its_own() -> None:
    module, x = layers(4), torch.randn(6, 2)
    expected = module(x)
    pipe = Pipe(partition_model(module, [3, 1], ["cpu", "cpu"]), chunks=3)
    assert [len(partition) for partition in pipe.partitions] == [3, 1]
    assert [name for name, _ in pipe.named_parameters()][-2:] == ["partitions.1.0.weight", "partitions.1.0.bias"]
    torch.testing.assert_close(pipe(x).local_value(), expected)


@pytest.mark.parametrize("balance", [[1, 1], [2, 2], [3, 0]])
def test_a_balance_that_does_not_fit(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="the number of layers"):
        partition_model(layers(3), balance, ["cpu", "cpu"])


def test_too_few_devices() -> None:
    with pytest.raises(IndexError, match="too few devices"):
        partition_model(layers(3), [2, 1], ["cpu"])


def test_devices_may_be_left_to_it() -> None:
    partitions = partition_model(layers(1), [1])
    assert partitions(torch.ones(1, 2, device=partitions[0][0].weight.device)).shape == (1, 2)
