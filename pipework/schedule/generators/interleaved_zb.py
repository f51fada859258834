"""Interleaved zero bubble: ZB-H1 with several stages per worker, which divide its bubble."""

from __future__ import annotations

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.costs import Costs
from pipework.schedule.generators.orders import in_rounds, warm_up_then_alternate
from pipework.schedule.list_schedule import list_schedule
from pipework.schedule.placement import loop_placement
from pipework.schedule.schedule import Schedule


def interleaved_zb(
    workers: int, micro_batches: int, stages_per_worker: int = 2, *, costs: Costs | None = None
) -> Schedule:
    """Run input halves in the order of interleaved 1F1B, and weight halves in the gaps.

    ::

        worker 0  0F0 0F1 2F0 2F1  .  2I0 2W0 0F2 2I1 0I0 2W1 0F3 0I1 0W0 2F2 0W1 2F3 2I2 2W2 2I3 0I2 0I3 2W3 0W2 0W3
        worker 1   .  1F0 1F1 3F0 3I0 3F1 3I1 1I0 3W0 1F2 1I1 3W1 1F3 1W0 1W1 3F2 3I2 3F3 3I3 1I2 1I3 3W2 3W3 1W2 1W3

    Micro-batches go through the stages of a worker in rounds of p, as in interleaved 1F1B. Gradients return sooner, so
    worker d runs only p - d - 1 + (v - 1)p forwards before it alternates. Weight halves fill the gaps; while memory is
    full, one runs before each forward. If p does not divide m, the last round is shorter, and input halves run before
    their turn to fill its gaps.

    Of p workers and m micro-batches, with F, I and W the time of a forward and the halves of a backward of a worker's
    whole share: where F = I = W and p divides m, the bubble is (p - 1)(F + I - W)/v. A worker holds up to min(m, p)
    micro-batches of the activations of its share. There are v times as many transfers as with one
    stage per worker.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    Args:
        workers: number of workers p.
        micro_batches: number of micro-batches m; any.
        stages_per_worker: v; stage s is on worker s mod p.
        costs: times that decide where weight halves fit; equal ones if None.

    Example:
        >>> schedule = interleaved_zb(2, 2, 2)
        >>> [str(action) for action in schedule.orders[1]]
        ['1F0', '1F1', '3F0', '3I0', '3F1', '3I1', '1I0', '1I1', '3W0', '3W1', '1W0', '1W1']
    """
    positive_integers(workers=workers, micro_batches=micro_batches, stages_per_worker=stages_per_worker)
    starts = range(0, micro_batches, workers)
    rounds = [range(start, min(start + workers, micro_batches)) for start in starts]
    priorities: list[tuple[Action, ...]] = []
    for worker in range(workers):
        stages = range(worker, workers * stages_per_worker, workers)
        warm_up = workers - worker - 1 + (stages_per_worker - 1) * len(rounds[0])
        forwards, backwards = in_rounds("F", stages, rounds), in_rounds("I", stages[::-1], rounds)
        priorities.append(warm_up_then_alternate(forwards, backwards, warm_up))
    placement = loop_placement(workers, stages_per_worker)
    limit = workers * stages_per_worker
    return Schedule(
        "interleaved-zb", placement, list_schedule(placement, priorities, limit, costs, overtaking="backwards")
    )
