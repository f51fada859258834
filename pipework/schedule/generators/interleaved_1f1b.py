"""Interleaved 1F1B: several stages per worker, which make the bubble of 1F1B smaller."""

from __future__ import annotations

from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.generators.orders import in_rounds, nearly_equal_rounds, warm_up_then_alternate
from pipework.schedule.placement import loop_placement
from pipework.schedule.schedule import Schedule


def interleaved_1f1b(workers: int, micro_batches: int, stages_per_worker: int = 2) -> Schedule:
    """Use v stages per worker, so that the pipe fills and drains in 1/v of the time.

    ::

        worker 0  0F0 0F1 2F0 2F1 0F2  .  2B0---- 0F3 2B1---- 2F2 0B0---- 2F3 0B1----  .  2B2---- ...
        worker 1   .  1F0 1F1 3F0 3B0---- 3F1 3B1---- 1F2 1B0---- 1F3 1B1---- 3F2 3B2---- 3F3 3B3---- ...

    Micro-batches go through the stages of a worker in rounds of p (of a few more if p does not divide m, so that the
    rounds are nearly equal): a round passes the worker's first stage, then its second, and so on; backwards start from
    its last stage. Each worker runs 2(p - d - 1) + (v - 1)r forwards of a first round of r before it alternates.

    Of p workers and m micro-batches, with F and B the time of a forward and a backward of a worker's whole share: the
    bubble is (p - 1)(F + B)/v where p divides m, and a worker then holds up to (2(p - 1) + (v - 1)p + 1)/v
    micro-batches of the activations of its share; with a longest round of r, (2(p - 1) + (v - 1)r + 1)/v. There are v
    times as many transfers as with one stage per worker.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473.

    Args:
        workers: number of workers p.
        micro_batches: number of micro-batches m; any.
        stages_per_worker: v; stage s is on worker s mod p.

    Example:
        >>> schedule = interleaved_1f1b(2, 2, 2)
        >>> [str(action) for action in schedule.orders[1]]
        ['1F0', '1F1', '3F0', '3B0', '3F1', '3B1', '1B0', '1B1']
    """
    positive_integers(workers=workers, micro_batches=micro_batches, stages_per_worker=stages_per_worker)
    rounds = nearly_equal_rounds(micro_batches, max(1, micro_batches // workers))
    orders = []
    for worker in range(workers):
        stages = range(worker, workers * stages_per_worker, workers)
        forwards = in_rounds("F", stages, rounds)
        backwards = in_rounds("B", stages[::-1], rounds)
        warm_up = 2 * (workers - worker - 1) + (stages_per_worker - 1) * len(rounds[0])
        orders.append(warm_up_then_alternate(forwards, backwards, warm_up))
    return Schedule("interleaved-1f1b", loop_placement(workers, stages_per_worker), tuple(orders))
