"""The names that all three old libraries have beside their pipes."""

from pipework.compat.adapter import verify_skippables
from pipework.model.batchnorm import DeferredBatchNorm
from pipework.model.checkpoint import is_checkpointing, is_recomputing
from pipework.skip import Namespace, Skippable, pop, skippable, stash

__all__ = ["DeferredBatchNorm", "is_checkpointing", "is_recomputing", "verify_skippables"]
__all__ += ["Namespace", "Skippable", "pop", "skippable", "stash"]
