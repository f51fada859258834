"""Groups layers into partitions before a `Pipe` wraps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from pipework.assignment.partition import choose_partitioning, split_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.sequential import Device

__all__ = ["partition_model"]


def partition_model(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[Device] | None = None
) -> nn.Sequential:
    """Groups layers into partitions and moves them to their devices; in each partition they are counted from 0.

    Args:
        module: the layers.
        balance: the number of layers of each partition.
        devices: of each partition; None: the visible accelerators, or the CPU where there is none.

    Returns:
        The partitions, to be wrapped in a `Pipe`.

    Raises:
        ValueError: the balance does not fit, or a device cannot be used.
        IndexError: fewer devices than partitions.

    Example:
        >>> module = nn.Sequential(nn.RMSNorm(4), nn.ReLU(), nn.RMSNorm(4))
        >>> list(partition_model(module, [2, 1], ["cpu", "cpu"]).state_dict())
        ['0.0.weight', '1.0.weight']
    """
    partitions = split_layers(module, choose_partitioning(module, balance, devices))
    return nn.Sequential(*(nn.Sequential(*each) for each in partitions))
