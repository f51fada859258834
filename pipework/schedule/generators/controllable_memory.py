"""V-Half and V-Min: about a half and a third of 1F1B's memory, with two stages per worker in V placement."""

from __future__ import annotations

from collections.abc import Sequence

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.costs import Costs
from pipework.schedule.generators.orders import Hops, v_pattern
from pipework.schedule.list_schedule import list_schedule
from pipework.schedule.placement import wave_placement
from pipework.schedule.schedule import Schedule


def v_half(workers: int, micro_batches: int, *, costs: Costs | None = None) -> Schedule:
    """Keep half of p micro-batches in flight: little more than half of 1F1B's memory, less than half of its bubble.

    ::

        worker 0  0F0 0F1 0F2  .   .   .   .  7F0 7I0 7W0  .  7F1 7I1 7F2 7I2 0I0 7W1 7W2 0W0 0I1 0W1 0I2 0W2
        worker 1   .  1F0 1F1  .   .   .  6F0 1F2  .  6I0 6F1 6W0 6F2 6I1 1I0 6I2 6W1 1W0 1I1 6W2 1I2 1W1 1W2
        worker 2   .   .  2F0 2F1  .  5F0  .   .  2F2 5F1 5I0 5F2 5W0 2I0 5I1 2W0 5I2 2I1 5W1 2I2 5W2 2W1 2W2
        worker 3   .   .   .  3F0 4F0 3F1 4F1  .   .  3F2 4F2 4I0 3I0 4W0 3W0 4I1 3I1 4I2 3I2 4W1 3W1 4W2 3W2

    All micro-batches follow one pattern, at a distance that keeps all workers busy. Forwards of first stages and
    backwards of second stages take two units from worker to worker, the others one. So the first workers hold the
    activations of their first stage for long and those of their second briefly, the last ones hold both for a medium
    time, and all need the same memory. Input halves may run earlier than in the pattern, forwards may not; weight
    halves fill the gaps.

    Of p workers and m micro-batches, with F, I and W the time of a forward and the halves of a backward of a worker's
    whole share: where F = I = W and m is large enough, the bubble is (3p - 7)F/2 for even p from 4 on and (3p - 4)F/2
    for odd p from 3 on; that of 1F1B is 3(p - 1)F. A worker holds up to (p + 2)//2 micro-batches of the activations of
    its share.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362. The compaction of the
    pattern is pipework's own.

    Args:
        workers: number of workers p; worker d has the stages d and 2p - 1 - d.
        micro_batches: number of micro-batches m; any.
        costs: times that decide where weight halves fit; equal ones if None.

    Example:
        >>> from pipework.schedule import simulate
        >>> [max(simulate(v_half(p, 20), Costs(activation=0.5)).peak_memory) for p in (2, 4, 8, 16)]
        [2.0, 3.0, 5.0, 9.0]
    """
    positive_integers(workers=workers, micro_batches=micro_batches)
    # The two forwards of worker d are 3(p - 1) + turn - 3d units apart. They must not collide modulo the six units of a
    # micro-batch, nor may its backwards, nor a forward with a backward. Whether they collide depends on p.
    hops = Hops(down=2, back=2) if workers % 2 else Hops(down=2, turn=3, loss=4, back=2)
    return _compacted("v-half", v_pattern(workers, micro_batches, hops), (workers + 2) // 2, costs)


def v_min(workers: int, micro_batches: int, *, costs: Costs | None = None) -> Schedule:
    """Keep a third of p micro-batches in flight, the fewest that keep workers busy: a third of 1F1B's memory.

    ::

        worker 0  0F0 0F1  .   .   .   .   .  7F0 7I0 7W0  .   .   .  7F1 7I1 0I0 7W1 0W0  .   .   .  0I1 0W1
        worker 1   .  1F0  .   .   .   .  6F0 1F1  .  6I0 6W0  .  6F1  .  1I0 6I1 1W0 6W1  .   .  1I1 1W1  .
        worker 2   .   .  2F0  .   .  5F0  .   .  2F1  .  5I0 5F1 5W0 2I0 2W0  .  5I1 5W1  .  2I1 2W1  .   .
        worker 3   .   .   .  3F0 4F0  .   .   .   .  3F1 4F1 4I0 3I0 4W0 3W0  .   .  4I1 3I1 4W1 3W1  .   .

    A micro-batch takes 4p units from its first forward to its last input half, never waits, and costs each worker six
    units, after which the next one follows. There is no slack: where F, I and W differ, or transfers take time, workers
    wait in every round.

    Of p workers and m micro-batches, with F, I and W the time of a forward and the halves of a backward of a worker's
    whole share: where F = I = W, the bubble is (4p - 5)F/2, and (4p - 7)F/2 where 3 divides p and m is large enough;
    that of 1F1B is 3(p - 1)F. A worker holds up to (p + 4)//3 micro-batches of the activations of its share.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362. The compaction of the
    pattern is pipework's own.

    Args:
        workers: number of workers p; worker d has the stages d and 2p - 1 - d.
        micro_batches: number of micro-batches m; any.
        costs: times that decide where weight halves fit; equal ones if None.

    Example:
        >>> from pipework.schedule import simulate
        >>> [max(simulate(v_min(p, 20), Costs(activation=0.5)).peak_memory) for p in (2, 4, 8, 16)]
        [2.0, 2.0, 4.0, 6.0]
    """
    positive_integers(workers=workers, micro_batches=micro_batches)
    # A worker's first forward and the backward of its second stage are 2p units apart. If 3 divides p, that is a
    # multiple of the six units of a micro-batch, and they would collide, so the corners take a little longer.
    hops = Hops() if workers % 3 else Hops(turn=2, loss=2, again=3)
    return _compacted("v-min", v_pattern(workers, micro_batches, hops), (workers + 4) // 3, costs)


def _compacted(name: str, priorities: Sequence[Sequence[Action]], held: int, costs: Costs | None) -> Schedule:
    """Make a schedule of a V pattern, in which a worker holds the activations of `held` micro-batches of its share.

    Example:
        >>> _compacted("v", v_pattern(2, 3, Hops()), 2, None).placement
        (0, 1, 1, 0)
    """
    placement = wave_placement(len(priorities), 2)
    return Schedule(name, placement, list_schedule(placement, priorities, 2 * held, costs, overtaking="backwards"))
