"""The adapter for fairscale's `Pipe`."""

from typing import ClassVar

from pipework.compat.balanced import BalancedPipe

__all__ = ["Pipe"]


class Pipe(BalancedPipe):
    """Cuts an `nn.Sequential` into partitions, as `balance` says, and each mini-batch into micro-batches.

    See `pipework.compat.balanced.BalancedPipe`.
    """

    _balance_package: ClassVar[str] = "fairscale.nn.pipe.balance"
    _import_line: ClassVar[str] = "from fairscale.nn import Pipe"
