"""V-Min: a third of the memory of 1F1B and two thirds of its bubble, with two stages per worker in V placement."""

from __future__ import annotations

from pipework.schedule.arguments import positive_integer
from pipework.schedule.costs import Costs
from pipework.schedule.generators.v_half import patterned
from pipework.schedule.priorities import Hops, repeated
from pipework.schedule.schedule import Schedule


def v_min(workers: int, micro_batches: int, *, costs: Costs | None = None) -> Schedule:
    """Send each micro-batch through the pipe without a stop, and the next one only when all workers have time for it.

    ::

        worker 0  0F0 0F1  .   .   .   .   .  7F0 7I0 7W0  .   .   .  7F1 7I1 0I0 7W1 0W0  .   .   .  0I1 0W1
        worker 1   .  1F0  .   .   .   .  6F0 1F1  .  6I0 6W0  .  6F1  .  1I0 6I1 1W0 6W1  .   .  1I1 1W1  .
        worker 2   .   .  2F0  .   .  5F0  .   .  2F1  .  5I0 5F1 5W0 2I0 2W0  .  5I1 5W1  .  2I1 2W1  .   .
        worker 3   .   .   .  3F0 4F0  .   .   .   .  3F1 4F1 4I0 3I0 4W0 3W0  .   .  4I1 3I1 4W1 3W1  .   .

    A micro-batch takes 4p units from its first forward to its last input half, and the next follows after the six units
    that it costs each worker. So a third of p micro-batches are in flight, which is the least that keeps all workers
    busy. It hangs together by a thread: where F, I and W differ, or transfers take time, workers wait in every round.

    Of p workers and m micro-batches, with F, I and W the time of a forward and the halves of a backward of a worker's
    whole share: where F = I = W, the bubble is (4p - 5)F/2, and (4p - 7)F/2 where 3 divides p and m is large enough, of
    the 3(p - 1)F of 1F1B. A worker holds up to (p + 4)//3 micro-batches of the activations of its share.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362. How the pattern is squeezed
    together is pipework's own.

    Args:
        workers: number of workers p; worker d has the stages d and 2p - 1 - d.
        micro_batches: number of micro-batches m; any.
        costs: times that decide where weight halves fit; equal ones if None.

    Returns:
        The schedule, named ``"v-min"``.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is less than 1, or the costs are for another number of stages.

    Example:
        >>> [max(v_min(p, 20).simulate(Costs(activation=0.5)).peak_memory) for p in (2, 4, 8, 16)]
        [2.0, 2.0, 4.0, 6.0]
    """
    positive_integer("workers", workers)
    positive_integer("micro_batches", micro_batches)
    # A worker's first forward and the backward of its second stage are 2p units apart. Where 3 divides p, that is a
    # multiple of the six units that a micro-batch takes, so they would meet: the corners take a little longer there.
    hops = Hops() if workers % 3 else Hops(turn=2, loss=2, again=3)
    return patterned("v-min", repeated(workers, micro_batches, hops), (workers + 4) // 3, costs)
