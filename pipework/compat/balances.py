"""`balance_by_time` and `balance_by_size` as the old libraries have them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

from pipework import balance
from pipework.compat.engine import TupleKeeping

if TYPE_CHECKING:
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
    return balance.balance_by_time(partitions, _kept(module), sample, timeout=timeout, device=device)


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
    return balance.balance_by_size(
        partitions, _kept(module), input, chunks=chunks, param_scale=param_scale, device=device
    )


def _kept(module: nn.Sequential) -> nn.Sequential:
    layers = TupleKeeping(OrderedDict(module.named_children()))
    layers.training = module.training
    return layers
