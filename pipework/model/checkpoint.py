"""Which micro-batches are recomputed: the three checkpoint modes."""

from __future__ import annotations

from pipework.runtime.stage.recompute_phase import is_checkpointing, is_recomputing

__all__ = ["MODES", "checkpointed_micro_batches", "is_checkpointing", "is_recomputing"]

MODES = ("always", "except_last", "never")


def checkpointed_micro_batches(mode: str, micro_batches: int) -> int:
    """How many micro-batches, counted from the first, are recomputed.

    To leave out the last one saves one recomputation, at the price of its activations: its backward is the last.
    While the others are recomputed, one after the other, its activations wait.

    Args:
        mode: 'always', 'except_last' or 'never'.
        micro_batches: the actual number, which a small batch makes smaller than `chunks`.

    Example:
        >>> [checkpointed_micro_batches(mode, 4) for mode in MODES]
        [4, 3, 0]
    """
    return {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[mode]
