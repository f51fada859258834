"""1F1B, eager and interleaved 1F1B: after a warm-up, every worker alternates between a forward and a backward."""

from __future__ import annotations

from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.generators.orders import in_rounds, nearly_equal_rounds, warm_up_then_alternate
from pipework.schedule.placement import loop_placement
from pipework.schedule.schedule import Schedule


def one_forward_one_backward(workers: int, micro_batches: int) -> Schedule:
    """Run each micro-batch's backward as soon as its gradient arrives, which frees its activations early.

    ::

        worker 0  0F0 0F1 0F2  .   .   .   .  0B0---- 0F3 0B1----  .  0B2----  .  0B3----
        worker 1   .  1F0 1F1  .   .  1B0---- 1F2 1B1---- 1F3 1B2----  .  1B3----  .   .
        worker 2   .   .  2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3----  .   .   .   .

    Of p workers and m micro-batches, with F and B the time of a forward and a backward of one stage: the makespan is
    (m + p - 1)(F + B), as in fill-drain, but worker d holds only min(m, p - d) micro-batches of activations,
    however large m is. So m can grow until the bubble, a share (p - 1)/(m + p - 1) of the step, is negligible. No
    schedule with one stage per worker and undivided backwards is faster.

    Source: PipeDream-Flush in Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, arXiv 2006.09503.

    Args:
        workers: number of workers p, each with one stage.
        micro_batches: number of micro-batches m; may be fewer than workers.

    Example:
        >>> [str(action) for action in one_forward_one_backward(2, 3).orders[0]]
        ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    return _alternating("1f1b", workers, micro_batches, ahead=1)


def eager_1f1b(workers: int, micro_batches: int) -> Schedule:
    """Double the warm-up of 1F1B, so that transfers are hidden behind work.

    ::

        worker 0  0F0 0F1 0F2 0F3 0F4  .   .  0B0---- 0B1---- 0B2----  .  0B3----  .  0B4----
        worker 1   .  1F0 1F1 1F2  .  1B0---- 1F3 1B1---- 1F4 1B2---- 1B3----  .  1B4----  .   .
        worker 2   .   .  2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- 2F4 2B4----  .   .   .   .

    If transfers take time, a worker of 1F1B waits in every turn: its next gradient arrives two transfers later than it
    needs it. Here another micro-batch is in flight on each boundary in the meantime. For p = 8 and m = 32, transfers
    add the time of 14 of them to a step, the least that a micro-batch needs; they add 68 to a step of 1F1B.

    Of p workers and m micro-batches, with F and B the time of a forward and a backward of one stage: without transfers
    the bubble is that of 1F1B, (p - 1)(F + B); worker d holds min(m, 2(p - d) - 1) micro-batches of activations.

    Source: Zhuang et al., On Optimizing the Communication of Model Parallelism, arXiv 2211.05322.

    Args:
        workers: number of workers p, each with one stage.
        micro_batches: number of micro-batches m; any.

    Example:
        >>> [str(action) for action in eager_1f1b(2, 4).orders[0]]
        ['0F0', '0F1', '0F2', '0B0', '0F3', '0B1', '0B2', '0B3']
    """
    return _alternating("eager-1f1b", workers, micro_batches, ahead=2)


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
    return _alternating("interleaved-1f1b", workers, micro_batches, stages_per_worker, ahead=2)


def _alternating(name: str, workers: int, micro_batches: int, stages_per_worker: int = 1, *, ahead: int) -> Schedule:
    """Make orders with a warm-up of `ahead` forwards for each worker behind, and a round for each further stage.

    Example:
        >>> [str(action) for action in _alternating("eager", 2, 3, ahead=2).orders[0]]
        ['0F0', '0F1', '0F2', '0B0', '0B1', '0B2']
    """
    positive_integers(workers=workers, micro_batches=micro_batches, stages_per_worker=stages_per_worker)
    rounds = nearly_equal_rounds(micro_batches, max(1, micro_batches // workers))
    orders = []
    for worker in range(workers):
        stages = range(worker, workers * stages_per_worker, workers)
        forwards, backwards = in_rounds("F", stages, rounds), in_rounds("B", stages[::-1], rounds)
        warm_up = ahead * (workers - worker - 1) + (stages_per_worker - 1) * len(rounds[0])
        orders.append(warm_up_then_alternate(forwards, backwards, warm_up))
    return Schedule(name, loop_placement(workers, stages_per_worker), tuple(orders))
