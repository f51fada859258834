import pytest
from torch import nn

from pipework.compat.sync import partition_model


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def test_layers_are_grouped_and_counted_from_0_in_each_partition() -> None:
    module = layers(3)
    partitions = partition_model(module, [2, 1], ["cpu", "meta"])
    assert [list(partition) for partition in partitions] == [[module[0], module[1]], [module[2]]]
    assert list(partitions.state_dict())[-1] == "1.0.bias"
    assert [partition[0].weight.device.type for partition in partitions] == ["cpu", "meta"]


@pytest.mark.parametrize("balance", [[1, 1], [2, 2], [3, 0]])
def test_a_balance_that_does_not_fit(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="the number of layers"):
        partition_model(layers(3), balance, ["cpu", "cpu"])


def test_too_few_devices() -> None:
    with pytest.raises(IndexError, match="too few devices"):
        partition_model(layers(3), [2, 1], ["cpu"])
