"""Forward only: the schedule of inference."""

from __future__ import annotations

from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.generators.orders import in_rounds, nearly_equal_rounds
from pipework.schedule.placement import loop_placement
from pipework.schedule.schedule import Schedule


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
