"""Hanayo: waves through the workers with whole backwards, about the bubble of interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.costs import Costs
from pipework.schedule.generators.orders import Hops, nearly_equal_rounds, v_pattern, warm_up_then_alternate
from pipework.schedule.list_schedule import list_schedule
from pipework.schedule.placement import wave_placement
from pipework.schedule.schedule import Orders, Schedule


def hanayo(workers: int, micro_batches: int, stages_per_worker: int = 2, *, costs: Costs | None = None) -> Schedule:
    """Send micro-batches through the workers and back, v/2 times, so that the turns need no transfers.

    ::

        worker 0  0F0 0F1 0F2 3F0 3B0---- 3F1 3B1----  .   .  0B0---- 3F2 3B2---- 0B1----  .   .  0B2----
        worker 1   .  1F0 2F0 1F1 2F1  .  2B0---- 1F2 1B0---- 2F2 2B1---- 1B1---- 2B2---- 1B2----  .   .

    With two stages per worker, forwards run ahead within the memory below, and backwards run as soon as possible, those
    of earlier micro-batches first. With more stages, micro-batches go in rounds of p (of a few more if p does not
    divide m), each of which makes v/2 waves: forwards from the first worker to the last take every other unit of time
    of a worker, those from the last to the first take the others.

    Of p workers, v stages per worker and m micro-batches, with F and B the time of a forward and a backward of a
    worker's whole share: where B = 2F, the bubble is (p - 1)(F + B)/v for v = 2 (F/2 more for even p) if m is a little
    more than p, and up to (4p + 1)F/v for greater v if p divides m and m is at least 2p. A worker holds up
    to p + (p - 1)/v micro-batches of the activations of its share, for v > 2 if p divides m; rounds of r make that r +
    (p - 1)/v. With p micro-batches of memory, no order has a smaller bubble than 2(p - 1)B/v, since the last worker
    cannot begin enough forwards before its first backward.

    Source: Liu et al., Hanayo: Harnessing Wave-like Pipeline Parallelism, arXiv 2308.15762.

    Args:
        workers: number of workers p.
        micro_batches: number of micro-batches m; any.
        stages_per_worker: v, an even number; worker d has the stages d, 2p - 1 - d, 2p + d, 4p - 1 - d, ...
        costs: times that decide when an action is possible; unit costs if None.

    Example:
        >>> hanayo(2, 4, 4).placement
        (0, 1, 1, 0, 0, 1, 1, 0)
        >>> [str(action) for action in hanayo(2, 2).orders[1]]
        ['1F0', '2F0', '1F1', '2F1', '2B0', '1B0', '2B1', '1B1']
    """
    positive_integers(workers=workers, micro_batches=micro_batches, stages_per_worker=stages_per_worker)
    placement = wave_placement(workers, stages_per_worker)
    if stages_per_worker == 2:
        priorities = v_pattern(workers, micro_batches, Hops(back=5, again=5, home=5), backward="B")
        orders = list_schedule(placement, priorities, 3 * workers - 1, costs, overtaking="all")
    else:
        orders = _in_waves(placement, workers, micro_batches, costs)
    return Schedule("hanayo", placement, orders)


def _in_waves(placement: Sequence[int], workers: int, micro_batches: int, costs: Costs | None) -> Orders:
    rounds = nearly_equal_rounds(micro_batches, max(1, micro_batches // workers))
    longest = len(rounds[0])
    stages_per_worker = len(placement) // workers
    time = _clock(workers, stages_per_worker, rounds)
    priorities = []
    for worker in range(workers):
        mine = [stage for stage, home in enumerate(placement) if home == worker]
        pairs = [(stage, micro_batch) for stage in mine for micro_batch in range(micro_batches)]
        forwards = sorted(pairs, key=lambda pair: time(*pair))
        # Backwards mirror the forwards: they start from the other end.
        backwards = sorted(pairs, key=lambda pair: time(len(placement) - 1 - pair[0], pair[1]))
        priorities.append(
            warm_up_then_alternate(
                [Action("F", *pair) for pair in forwards],
                [Action("B", *pair) for pair in backwards],
                stages_per_worker * longest + worker - 1,
            )
        )
    limit = stages_per_worker * longest + workers - 1
    return list_schedule(placement, priorities, limit, costs, overtaking="backwards")


def _clock(workers: int, stages_per_worker: int, rounds: Sequence[range]) -> Callable[[int, int], int]:
    """The start of the forward of a stage and micro-batch, in units of a forward, if there were no backwards."""
    length = max(workers, len(rounds[0]))
    begin = {
        micro_batch: (number * stages_per_worker * length, micro_batch - each.start)
        for number, each in enumerate(rounds)
        for micro_batch in each
    }

    def time(stage: int, micro_batch: int) -> int:
        wave, position = divmod(stage, 2 * workers)
        start, place = begin[micro_batch]
        return start + 2 * length * wave + position + 2 * place

    return time
