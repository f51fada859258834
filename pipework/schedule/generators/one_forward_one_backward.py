"""1F1B: after a short warm-up, every worker runs one forward and one backward in turn."""

from __future__ import annotations

from pipework.schedule.action import Action
from pipework.schedule.checks import positive_integer
from pipework.schedule.generators.orders import warm_up_then_alternate
from pipework.schedule.placement import loop_placement
from pipework.schedule.schedule import Schedule


def one_forward_one_backward(workers: int, micro_batches: int) -> Schedule:
    """Begin each micro-batch's backward as early as its gradient is there, so that its activations are soon given back.

    ::

        worker 0  0F0 0F1 0F2  .   .   .   .  0B0---- 0F3 0B1----  .  0B2----  .  0B3----
        worker 1   .  1F0 1F1  .   .  1B0---- 1F2 1B1---- 1F3 1B2----  .  1B3----  .   .
        worker 2   .   .  2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3----  .   .   .   .

    Of p workers and m micro-batches, with F and B the time of a forward and a backward of one stage: the makespan is
    (m + p - 1)(F + B), as that of fill-drain, but worker d holds only min(m, p - d) micro-batches of activations,
    however large m is. So m can grow until the bubble, (p - 1)/(m + p - 1), does not matter. No schedule with one stage
    per worker and undivided backwards is faster.

    Source: PipeDream-Flush in Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, arXiv 2006.09503.

    Args:
        workers: number of workers p, each with one stage.
        micro_batches: number of micro-batches m; fewer than workers will do.

    Returns:
        The schedule, named ``"1f1b"``.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is less than 1.

    Example:
        >>> [str(action) for action in one_forward_one_backward(2, 3).orders[0]]
        ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    return alternating("1f1b", workers, micro_batches, ahead=1)


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


def alternating(name: str, workers: int, micro_batches: int, *, ahead: int) -> Schedule:
    """One stage per worker, whose warm-up is `ahead` forwards for each worker behind it.

    Args:
        name: of the schedule.
        workers: number of workers.
        micro_batches: number of micro-batches.
        ahead: 1 is what keeps the workers behind busy, more hides transfers.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is less than 1.

    Example:
        >>> [str(action) for action in alternating("eager", 2, 3, ahead=2).orders[0]]
        ['0F0', '0F1', '0F2', '0B0', '0B1', '0B2']
    """
    positive_integer("workers", workers)
    positive_integer("micro_batches", micro_batches)
    orders = []
    for stage in range(workers):
        forwards = [Action("F", stage, micro_batch) for micro_batch in range(micro_batches)]
        backwards = [Action("B", stage, micro_batch) for micro_batch in range(micro_batches)]
        orders.append(warm_up_then_alternate(forwards, backwards, ahead * (workers - stage - 1)))
    return Schedule(name, loop_placement(workers, 1), tuple(orders))
