"""Fill-drain, the schedule of GPipe: all forwards of a mini-batch, then all backwards."""

from __future__ import annotations

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.schedule import Schedule


def fill_drain(workers: int, micro_batches: int) -> Schedule:
    """Fill the pipe with every forward, then drain it with every backward.

    ::

        worker 0  0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
        worker 1   .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
        worker 2   .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .

    Of p workers and m micro-batches, with F and B the time of a forward and a backward of one stage: the makespan is
    (m + p - 1)(F + B), of which a worker is idle for the bubble (p - 1)(F + B); a worker holds up to m micro-batches of
    activations. It suits a loss that is computed outside of the pipe, since such a loss needs all outputs first.

    The original runs the backwards from the last micro-batch to the first. Here they run in ascending order: a
    parameter's gradient is then the sum over micro-batches 0, 1, 2, .. in this order, as in every other schedule and as
    in a plain loop over micro-batches, so that results are bitwise equal. Time and memory are the same.

    Source: Huang et al., GPipe, arXiv 1811.06965.

    Args:
        workers: number of workers p, each with one stage.
        micro_batches: number of micro-batches m.

    Example:
        >>> [str(action) for action in fill_drain(2, 2).orders[1]]
        ['1F0', '1F1', '1B0', '1B1']
    """
    positive_integers(workers=workers, micro_batches=micro_batches)
    orders = tuple(
        tuple(Action(kind, stage, micro_batch) for kind in "FB" for micro_batch in range(micro_batches))
        for stage in range(workers)
    )
    return Schedule("gpipe", placement=tuple(range(workers)), orders=orders)
