"""Placements: the worker of each stage."""

from __future__ import annotations

from collections.abc import Sequence


def loop_placement(workers: int, stages_per_worker: int) -> tuple[int, ...]:
    """Place stages round the workers: of p workers, worker d holds the stages d, d + p, d + 2p, ...

    Example:
        >>> loop_placement(2, 3)
        (0, 1, 0, 1, 0, 1)
    """
    return tuple(range(workers)) * stages_per_worker


def wave_placement(workers: int, stages_per_worker: int) -> tuple[int, ...]:
    """Place stages through the workers and back: worker d holds the stages d, 2p - 1 - d, 2p + d, 4p - 1 - d, ...

    With two stages per worker this is V placement. The last worker holds the two stages at the turn, and worker 0 holds
    the first stage and the last one, which computes each loss.

    Raises:
        ValueError: the number of stages per worker is odd, so that the last pass would not return.

    Example:
        >>> wave_placement(3, 2)
        (0, 1, 2, 2, 1, 0)
    """
    if stages_per_worker % 2:
        raise ValueError(
            f"stages_per_worker is {stages_per_worker}: stages go through the workers and back again, so each worker "
            "holds an even number of them; choose 2, 4, ..."
        )
    there = tuple(range(workers))
    return (there + there[::-1]) * (stages_per_worker // 2)


def named_stages(placement: Sequence[int], worker: int) -> str:
    """The stages of a worker, for messages.

    Example:
        >>> named_stages((0, 1, 0), 0), named_stages((0, 1, 0), 1)
        ('stages 0, 2', 'stage 1')
    """
    stages = [str(stage) for stage, place in enumerate(placement) if place == worker]
    return f"stage{'' if len(stages) == 1 else 's'} {', '.join(stages)}"
