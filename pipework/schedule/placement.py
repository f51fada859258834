"""Placements: which worker holds which stage."""

from __future__ import annotations


def loop_placement(workers: int, stages_per_worker: int) -> tuple[int, ...]:
    """Stages go round the workers again and again: worker d holds the stages d, d + p, d + 2p, ...

    Example:
        >>> loop_placement(2, 3)
        (0, 1, 0, 1, 0, 1)
    """
    return tuple(range(workers)) * stages_per_worker
