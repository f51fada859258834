"""The three checkpoint modes, which choose the micro-batches that are recomputed."""

from __future__ import annotations

from pipework.runtime.stage.recomputation import is_checkpointing, is_recomputing

__all__ = ["AS_SCHEDULED", "MODES", "checkpointed_micro_batches", "is_checkpointing", "is_recomputing"]

MODES = ("always", "except_last", "never")
AS_SCHEDULED = "as scheduled"
"""What `pipe.checkpoint` is if the pipe got a schedule of the caller's own that says what is recomputed."""


def checkpointed_micro_batches(mode: str, micro_batches: int) -> int:
    """The number of micro-batches, counted from the first, that are recomputed.

    'except_last' saves one recomputation and costs the memory of the last micro-batch's activations, which are kept
    while the others are recomputed one after the other.

    Args:
        mode: 'always', 'except_last' or 'never'.
        micro_batches: the actual number; with a small batch it is smaller than `chunks`.

    Example:
        >>> [checkpointed_micro_batches(mode, 4) for mode in MODES]
        [4, 3, 0]
    """
    return {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[mode]
