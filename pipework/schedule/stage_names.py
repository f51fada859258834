"""What the stages of a worker are called in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def named_stages(placement: Sequence[int], worker: int) -> str:
    """The stages of a worker.

    Args:
        placement: the worker of each stage.
        worker: which one.

    Example:
        >>> named_stages((0, 1, 0), 0), named_stages((0, 1, 0), 1)
        ('stages 0, 2', 'stage 1')
    """
    stages = [str(stage) for stage, place in enumerate(placement) if place == worker]
    return f"stage{'' if len(stages) == 1 else 's'} {', '.join(stages)}"
