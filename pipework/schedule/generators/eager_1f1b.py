"""Eager 1F1B: 1F1B with a longer warm-up, so that transfers are hidden behind work."""

from __future__ import annotations

from pipework.schedule.generators.one_forward_one_backward import alternating
from pipework.schedule.schedule import Schedule


def eager_1f1b(workers: int, micro_batches: int) -> Schedule:
    """Run twice as many forwards ahead as 1F1B, so that values arrive before they are needed.

    ::

        worker 0  0F0 0F1 0F2 0F3 0F4  .   .  0B0---- 0B1---- 0B2----  .  0B3----  .  0B4----
        worker 1   .  1F0 1F1 1F2  .  1B0---- 1F3 1B1---- 1F4 1B2---- 1B3----  .  1B4----  .   .
        worker 2   .   .  2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- 2F4 2B4----  .   .   .   .

    Where a transfer takes time, a worker of 1F1B waits in every turn: what it sends comes back two transfers later than
    its next turn needs. Here another micro-batch is in flight on each boundary meanwhile. A step of p = 8 and m = 32
    takes 14 transfers longer than without any, as a micro-batch must; a step of 1F1B 68.

    Of p workers and m micro-batches, with F and B the time of a forward and a backward of one stage: without transfers
    the bubble is that of 1F1B, (p - 1)(F + B); worker d holds min(m, 2(p - d) - 1) micro-batches of activations.

    Source: Zhuang et al., On Optimizing the Communication of Model Parallelism, arXiv 2211.05322.

    Args:
        workers: number of workers p, each with one stage.
        micro_batches: number of micro-batches m; any.

    Returns:
        The schedule, named ``"eager-1f1b"``.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is less than 1.

    Example:
        >>> [str(action) for action in eager_1f1b(2, 4).orders[0]]
        ['0F0', '0F1', '0F2', '0B0', '0F3', '0B1', '0B2', '0B3']
    """
    return alternating("eager-1f1b", workers, micro_batches, ahead=2)
