"""ZB-H1 and ZB-H2: 1F1B with split backwards, whose weight halves fill the bubble."""

from __future__ import annotations

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.phases import Orders
from pipework.schedule.placement import loop_placement
from pipework.schedule.schedule import Schedule


def zb_h1(workers: int, micro_batches: int) -> Schedule:
    """Delay weight halves, so that input gradients pass sooner and weight halves fill the bubble, with 1F1B's memory.

    ::

        worker 0  0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        worker 1   .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        worker 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    In turn i, worker d runs ``F`` of micro-batch i, ``I`` of i - (p - 1 - d) as in 1F1B, and ``W`` of i - (p - 1).
    Later workers delay their weight halves longer, so that all workers hold the same memory.

    Of p workers and m micro-batches, with F, I and W the time of a forward and the halves of a backward of one stage:
    the bubble is (p - 1)(F + I - W) if these are nearly equal and m is at least p; a worker holds up to min(m, p)
    micro-batches of activations, as worker 0 does in 1F1B. Where F = I = W and m is at least p, no schedule with one
    stage per worker and this memory is faster.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    Args:
        workers: number of workers p, each with one stage.
        micro_batches: number of micro-batches m; any.

    Example:
        >>> [str(action) for action in zb_h1(2, 2).orders[1]]
        ['1F0', '1I0', '1F1', '1I1', '1W0', '1W1']
    """
    positive_integers(workers=workers, micro_batches=micro_batches)
    return Schedule("zb-h1", loop_placement(workers, 1), _in_turns(workers, micro_batches, ahead=1))


def zb_h2(workers: int, micro_batches: int) -> Schedule:
    """Fill the rest of the bubble with forwards, for twice the memory of ZB-H1.

    ::

        worker 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4  .   .
        worker 1   .  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4  .
        worker 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4

    In turn i, worker d runs ``F`` of micro-batch i, ``I`` of i - 2(p - 1 - d) and ``W`` of i - 2(p - 1).

    Of p workers and m micro-batches, with F, I and W the time of a forward and the halves of a backward of one stage:
    where F = I = W and m is at least 2p - 1, no worker waits in its busy window, which is the time of a step if the
    next one begins at once (for unequal times a bubble of (p - 1)(F + I - 2W) remains). But worker d begins d forwards
    after worker 0 and ends as much later, so a step that ends with a barrier, such as gradient clipping, takes as long
    as with ZB-H1. A worker holds up to min(m, 2p - 1) micro-batches of activations.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    Args:
        workers: number of workers p, each with one stage.
        micro_batches: number of micro-batches m; with fewer than 2p - 1, ZB-H1 is the better choice.

    Example:
        >>> [str(action) for action in zb_h2(2, 3).orders[0]]
        ['0F0', '0F1', '0F2', '0I0', '0W0', '0I1', '0W1', '0I2', '0W2']
    """
    positive_integers(workers=workers, micro_batches=micro_batches)
    return Schedule("zb-h2", loop_placement(workers, 1), _in_turns(workers, micro_batches, ahead=2))


def _in_turns(workers: int, micro_batches: int, ahead: int) -> Orders:
    """Make orders of turns, each with a forward, an input half and a weight half of earlier and earlier micro-batches.

    Before its first input half, each worker runs `ahead` forwards more than the next one.

    Example:
        >>> [str(action) for action in _in_turns(2, 2, ahead=1)[0]]
        ['0F0', '0F1', '0I0', '0W0', '0I1', '0W1']
    """
    orders = []
    for worker in range(workers):
        delays = (("F", 0), ("I", ahead * (workers - 1 - worker)), ("W", ahead * (workers - 1)))
        turns = range(micro_batches + ahead * (workers - 1))
        orders.append(
            tuple(
                Action(kind, worker, turn - delay)
                for turn in turns
                for kind, delay in delays
                if 0 <= turn - delay < micro_batches
            )
        )
    return tuple(orders)
