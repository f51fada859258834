"""1F1B: after a short warm-up, every worker runs one forward and one backward in turn."""

from __future__ import annotations

from itertools import chain

from pipework.schedule.action import Action
from pipework.schedule.arguments import positive_integer
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


def warm_up_then_alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Some forwards, then one forward and one backward in turn, then the backwards that are left.

    Example:
        >>> forwards, backwards = ([Action(kind, 0, i) for i in range(3)] for kind in "FB")
        >>> [str(action) for action in warm_up_then_alternate(forwards, backwards, 1)]
        ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    turns = chain.from_iterable(zip(forwards[warm_up:], backwards[:steady], strict=True))
    return (*forwards[:warm_up], *turns, *backwards[steady:])
