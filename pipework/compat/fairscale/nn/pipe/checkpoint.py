"""Whether a layer runs in the first pass of a checkpointed micro-batch, or in its recomputation."""

from pipework.model.checkpoint import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
