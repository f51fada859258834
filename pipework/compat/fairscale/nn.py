"""The adapter for `fairscale.nn`, of which it has `Pipe` alone, and for `fairscale.nn.pipe`."""

from typing import ClassVar

from pipework.compat import torchgpipe
from pipework.compat.adapter import refuse_unfit
from pipework.compat.installing import add_submodules
from pipework.compat.torchgpipe import *  # noqa: F403  all but `GPipe`, which is replaced

__all__ = ["Pipe", "verify_module", *(name for name in torchgpipe.__all__ if name not in ("GPipe", "verify_module"))]


verify_module = refuse_unfit


class Pipe(torchgpipe.BalancedPipe):
    """See `pipework.compat.torchgpipe.BalancedPipe`."""

    _balance_package: ClassVar[str] = "fairscale.nn.pipe.balance"


add_submodules(__name__)
