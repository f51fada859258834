"""Automatic balance, for `partition_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

import pipework
from pipework.compat.adapted_pipe import sequence
from pipework.model.sequential import PipeSequential

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.sequential import Device

__all__ = ["balance_by_size", "balance_by_time"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensor | Sequence[Any],
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Balances the time that the partitions take for forward and backward; see `pipework.balance_by_time`.

    Args:
        partitions: their number.
        module: the layers.
        sample: the input of the first layer, or a list of its inputs.
        timeout: for how many seconds to measure.
        device: where to run; None: the current accelerator, else the CPU.

    Raises:
        ValueError: the number of partitions is out of range, or a parameter has a gradient.
    """
    return pipework.balance_by_time(
        partitions, sequence(PipeSequential, module), _inputs(sample), timeout=timeout, device=device
    )


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Tensor | Sequence[Any],
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Balances the memory that the partitions need; see `pipework.balance_by_size`.

    Args:
        partitions: their number.
        module: the layers.
        input: of the first layer, a whole mini-batch, or a list of its inputs.
        chunks: into how many micro-batches it will be split.
        param_scale: how many copies of each parameter are held.
        device: where to run; None: the current accelerator, else the CPU.

    Raises:
        ValueError: an argument is out of range.
    """
    return pipework.balance_by_size(
        partitions,
        sequence(PipeSequential, module),
        _inputs(input),
        chunks=chunks,
        param_scale=param_scale,
        device=device,
    )


def _inputs(sample: Any) -> Any:
    return sample if isinstance(sample, Tensor) else tuple(sample)
