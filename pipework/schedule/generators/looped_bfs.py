"""Looped breadth-first: fill-drain with several stages per worker."""

from __future__ import annotations

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.placement import loop_placement
from pipework.schedule.schedule import Schedule


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
    orders = []
    for worker in range(workers):
        stages = range(worker, workers * stages_per_worker, workers)
        forwards = [Action("F", stage, micro_batch) for stage in stages for micro_batch in range(micro_batches)]
        backwards = [Action("B", stage, micro_batch) for stage in stages[::-1] for micro_batch in range(micro_batches)]
        orders.append((*forwards, *backwards))
    return Schedule("looped-bfs", loop_placement(workers, stages_per_worker), tuple(orders))
