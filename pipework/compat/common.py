"""The names that all three old libraries have beside their pipes."""

from torch import nn

from pipework.model.batchnorm import DeferredBatchNorm
from pipework.model.checkpoint import is_checkpointing, is_recomputing
from pipework.skip import Namespace, Skippable, layout, pop, skippable, stash

__all__ = ["DeferredBatchNorm", "is_checkpointing", "is_recomputing", "verify_skippables"]
__all__ += ["Namespace", "Skippable", "pop", "skippable", "stash"]


def verify_skippables(module: nn.Module) -> None:
    """Checks that one layer stashes each tensor and one later layer pops it.

    Raises:
        TypeError: one or more pairs of stash and pop do not match. All of them are listed.
    """
    layout.verify_skippables(module, exclusive=True)
