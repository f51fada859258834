"""The zero-bubble schedules, in which weight halves fill the gaps: ZB-H1, ZB-H2, interleaved zero bubble and ZB-V."""

from __future__ import annotations

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.costs import Costs
from pipework.schedule.generators.orders import in_rounds, numbered, warm_up_then_alternate
from pipework.schedule.list_schedule import list_schedule
from pipework.schedule.placement import loop_placement, wave_placement
from pipework.schedule.schedule import Orders, Schedule


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
    priorities = [_priorities(worker, workers, micro_batches) for worker in range(workers)]
    return Schedule("zb-v", placement, list_schedule(placement, priorities, 2 * workers, costs))


def _priorities(worker: int, workers: int, micro_batches: int) -> list[Action]:
    first, second = worker, 2 * workers - 1 - worker
    warm_up = [
        *[("F", first)] * (2 * (workers - worker) - 1),
        *[("F", second), ("F", first)] * worker,
        *[("F", second), ("I", second)] * (workers - worker),
    ]
    # Forwards run out first; the remaining backwards drain the pipe.
    turns = [("F", first), ("I", first), ("F", second), ("I", second)] * micro_batches
    return numbered(warm_up + turns, micro_batches)
