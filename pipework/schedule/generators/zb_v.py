"""ZB-V: zero bubble with the memory of 1F1B, two stages per worker in V placement."""

from __future__ import annotations

from collections.abc import Sequence

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.costs import Costs
from pipework.schedule.list_schedule import list_schedule
from pipework.schedule.placement import wave_placement
from pipework.schedule.priorities import numbered
from pipework.schedule.schedule import Schedule


def zb_v(workers: int, micro_batches: int, *, costs: Costs | None = None) -> Schedule:
    """Send micro-batches through the workers and back, so that worker 0 has the first loss early.

    ::

        worker 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 0I2 3W3 0I3 0W2 0W3  .
        worker 1   .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3

    Worker d begins with 2(p - d) - 1 forwards of its first stage and d more in turn with its second stage, then runs
    p - d forwards of its second stage, each with its backward, and then alternates between all four. Weight halves fill
    the gaps; while memory is full, one runs before each forward.

    Of p workers and m micro-batches, with F, I and W the time of a forward and the halves of a backward of a worker's
    whole share: where F = I = W, the bubble is (p - 1)F/2 if m is at least p, half of ZB-H1's, and no worker waits in
    its busy window if m is at least 2p. A worker holds up to min(m, p) micro-batches of the activations of its share.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    Args:
        workers: number of workers p; worker d has the stages d and 2p - 1 - d.
        micro_batches: number of micro-batches m; any.
        costs: times that decide where weight halves fit; equal ones if None.

    Example:
        >>> zb_v(2, 2).placement
        (0, 1, 1, 0)
        >>> [str(action) for action in zb_v(2, 2).orders[1]]
        ['1F0', '2F0', '1F1', '2F1', '2I0', '1I0', '2I1', '1I1', '2W0', '1W0', '2W1', '1W1']
    """
    positive_integers(workers=workers, micro_batches=micro_batches)
    placement = wave_placement(workers, 2)
    numbers = list(range(micro_batches))
    priorities = [_priorities(worker, workers, numbers) for worker in range(workers)]
    return Schedule("zb-v", placement, list_schedule(placement, priorities, 2 * workers, costs))


def _priorities(worker: int, workers: int, numbers: Sequence[int]) -> list[Action]:
    first, second = worker, 2 * workers - 1 - worker
    warm_up = [
        *[("F", first)] * (2 * (workers - worker) - 1),
        *[("F", second), ("F", first)] * worker,
        *[("F", second), ("I", second)] * (workers - worker),
    ]
    # Forwards run out first; the remaining backwards drain the pipe.
    turns = [("F", first), ("I", first), ("F", second), ("I", second)] * len(numbers)
    return numbered(warm_up + turns, len(numbers), numbers)
