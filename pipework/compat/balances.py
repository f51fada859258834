"""`balance_by_time`, `balance_by_size` and `solve` with the parameters of the old libraries."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch

import pipework
from pipework.assignment.minimax import minimax_partition
from pipework.compat.adapted_pipe import TupleKeeping, sequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

Device = torch.device | int | str


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensor | tuple[Tensor, ...],
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Balances the time that the partitions take for forward and backward; see `pipework.balance_by_time`.

    Args:
        partitions: their number.
        module: the layers; a tuple reaches each as one argument.
        sample: the input of the first layer.
        timeout: for how many seconds to measure.
        device: where to run; None: the current accelerator, else the CPU.

    Raises:
        ValueError: the number of partitions is out of range, or a parameter has a gradient.
    """
    return pipework.balance_by_time(partitions, sequence(TupleKeeping, module), sample, timeout=timeout, device=device)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Tensor | tuple[Tensor, ...],
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Balances the memory that the partitions need; see `pipework.balance_by_size`.

    Args:
        partitions: their number.
        module: the layers; a tuple reaches each as one argument.
        input: of the first layer, a whole mini-batch.
        chunks: into how many micro-batches it will be split.
        param_scale: how many copies of each parameter are held.
        device: where to run; None: the current accelerator, else the CPU.

    Raises:
        ValueError: an argument is out of range.
    """
    return pipework.balance_by_size(
        partitions, sequence(TupleKeeping, module), input, chunks=chunks, param_scale=param_scale, device=device
    )


def solve(sequence: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Cuts costs into consecutive blocks whose largest sum is as small as possible.

    Args:
        sequence: the costs.
        partitions: the number of blocks.

    Raises:
        ValueError: the number of blocks is out of range.

    Example:
        >>> solve([1, 2, 3, 4, 5, 6], 2)
        [[1, 2, 3, 4], [5, 6]]
    """
    costs = iter(sequence)
    return [list(islice(costs, count)) for count in minimax_partition(sequence, partitions)]
