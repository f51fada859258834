"""The adapter for torchgpipe's `GPipe`."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from pipework.compat.adapter import refuse_unfit
from pipework.compat.balanced import BalancedPipe

__all__ = ["GPipe"]


class GPipe(BalancedPipe):
    """Cuts an `nn.Sequential` into partitions, as `balance` says, and each mini-batch into micro-batches.

    See `pipework.compat.balanced.BalancedPipe`.
    """

    _balance_package: ClassVar[str] = "torchgpipe.balance"
    _import_line: ClassVar[str] = "from torchgpipe import GPipe"

    def _verify(self, module: Any) -> None:
        verify_module(module)

    def _verify_split(self, module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]) -> None:
        """Accepts every split: `_verify` has refused layers that share parameters."""


def verify_module(module: nn.Sequential) -> None:
    """Refuses modules that `GPipe` does not support.

    Raises:
        TypeError: the module is not an `nn.Sequential`.
        ValueError: a layer occurs in it twice, or two layers share a parameter.
    """
    refuse_unfit(module)
    if len(list(module.parameters())) != sum(len(list(child.parameters())) for child in module.children()):
        raise ValueError("module with duplicate parameters in distinct children is not supported")
