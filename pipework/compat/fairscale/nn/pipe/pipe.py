"""The adapter for fairscale's `Pipe`."""

from typing import Any, ClassVar

from pipework.compat.adapter import refuse_unfit
from pipework.compat.balanced import BalancedPipe

__all__ = ["Pipe"]


class Pipe(BalancedPipe):
    """Cuts an `nn.Sequential` into partitions, as `balance` says, and each mini-batch into micro-batches.

    See `pipework.compat.balanced.BalancedPipe`.
    """

    _balance_package: ClassVar[str] = "fairscale.nn.pipe.balance"
    _import_line: ClassVar[str] = "from fairscale.nn import Pipe"


def verify_module(module: Any) -> None:
    """Refuses modules that `Pipe` does not support.

    Raises:
        TypeError: the module is not an `nn.Sequential`.
        ValueError: a layer occurs in it twice.
    """
    refuse_unfit(module)
