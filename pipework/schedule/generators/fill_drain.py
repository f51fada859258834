"""Schedules that run all forwards first: fill-drain, the schedule of GPipe; looped breadth-first; forward only."""

from __future__ import annotations

from dataclasses import replace

from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.generators.orders import in_rounds, nearly_equal_rounds
from pipework.schedule.placement import loop_placement
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
    return replace(looped_bfs(workers, micro_batches, 1), name="gpipe")


def looped_bfs(workers: int, micro_batches: int, stages_per_worker: int = 2) -> Schedule:
    """Run all micro-batches through a worker's first stage, then its second, and so on; then backwards in reverse.

    ::

        worker 0  0F0 0F1 0F2 2F0 2F1 2F2  .   .   .  2B0---- 2B1---- 2B2---- 0B0---- 0B1---- 0B2----
        worker 1   .  1F0 1F1 1F2 3F0 3F1 3F2 3B0---- 3B1---- 3B2---- 1B0---- 1B1---- 1B2----  .   .

    Of p workers, v stages per worker and m micro-batches, with F and B the time of a forward and a backward of a
    worker's whole share: the bubble is (p - 1)(F + B)/v where m is at least p; a worker holds up to m micro-batches of
    activations. Each stage's weights are needed once in each direction, which suits sharded weights that are gathered
    for use.

    As in fill-drain, backwards run in ascending order of micro-batches, which makes gradients equal bit by bit to those
    of a plain loop.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.

    Args:
        workers: number of workers p.
        micro_batches: number of micro-batches m.
        stages_per_worker: v; stage s is on worker s mod p.

    Example:
        >>> [str(action) for action in looped_bfs(2, 2, 2).orders[0]]
        ['0F0', '0F1', '2F0', '2F1', '2B0', '2B1', '0B0', '0B1']
    """
    positive_integers(workers=workers, micro_batches=micro_batches, stages_per_worker=stages_per_worker)
    all_of_them = [range(micro_batches)]
    orders = []
    for worker in range(workers):
        stages = range(worker, workers * stages_per_worker, workers)
        orders.append((*in_rounds("F", stages, all_of_them), *in_rounds("B", stages[::-1], all_of_them)))
    return Schedule("looped-bfs", loop_placement(workers, stages_per_worker), tuple(orders))


def forward_only(workers: int, micro_batches: int, stages_per_worker: int = 1) -> Schedule:
    """Run every forward, and no backward: a schedule for inference.

    ::

        worker 0  0F0 0F1 0F2 0F3  .   .
        worker 1   .  1F0 1F1 1F2 1F3  .
        worker 2   .   .  2F0 2F1 2F2 2F3

    With several stages per worker, micro-batches go in rounds of p, or of a few more if p does not divide m.

    Of p workers, v stages per worker and m micro-batches, with F the time of a forward of a worker's whole share: the
    makespan is (m + (p - 1)/v)F where m is at least p, of which a worker is idle for the bubble (p - 1)F/v. A worker
    holds the activations of one micro-batch on one stage, and only while it computes them.

    Source: the first half of fill-drain, arXiv 1811.06965.

    Args:
        workers: number of workers p.
        micro_batches: number of micro-batches m; any.
        stages_per_worker: v; stage s is on worker s mod p.

    Example:
        >>> from pipework.schedule import simulate
        >>> result = simulate(forward_only(4, 8))
        >>> result.makespan, result.peak_memory
        (11.0, (1.0, 1.0, 1.0, 1.0))
    """
    positive_integers(workers=workers, micro_batches=micro_batches, stages_per_worker=stages_per_worker)
    rounds = nearly_equal_rounds(micro_batches, max(1, micro_batches // workers))
    orders = tuple(
        tuple(in_rounds("F", range(worker, workers * stages_per_worker, workers), rounds)) for worker in range(workers)
    )
    return Schedule("forward-only", loop_placement(workers, stages_per_worker), orders, inference=True)
