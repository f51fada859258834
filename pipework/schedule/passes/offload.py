"""The pass that moves what old micro-batches hold to the memory of the host, while the worker computes.

::

    without     F0    F1    F2    F3    B0       F4    B1       F5    B2          4 micro-batches are on the device
    with        F0 O0 F1 O1 F2 O2 F3 O3 B0    L1 F4 O4 B1    L2 F5 O5 B2          2 are
    to the host    ---   ---   ---   ---         |  ---      |  ---               O3 is awaited here
    back                          L0--           ---         ---
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import Final

from pipework.schedule.action import Action
from pipework.schedule.analysis.events import Run, run
from pipework.schedule.analysis.memory import SLACK, amounts
from pipework.schedule.analysis.validate import check
from pipework.schedule.costs import Costs, StageCosts, copy_time
from pipework.schedule.edges import recomputed
from pipework.schedule.schedule import Schedule

# A copy takes as long as a forward; the input of a stage is an eighth of what a micro-batch holds there.
_USUAL: Final = Costs(offload=1.0, reload=1.0, checkpoint_activation=0.125)


def with_offload(
    schedule: Schedule, costs: Costs | None = None, keep: int = 1, *, loss_outside: bool = False
) -> Schedule:
    """Add an ``O`` and an ``L`` for what old micro-batches hold on a stage.

    A micro-batch moves if at least `keep` other forwards of its stage come between its forward and its backward. Of a
    micro-batch that is recomputed the stored input moves, and comes back before ``R``; that of the first stage is the
    caller's, and stays. ``O`` comes right after the forward. ``L`` comes as late as possible if it shall end when the
    micro-batch is needed, with these costs and one ``L`` of a worker at a time. So copies hide behind the computation
    if the link is fast enough, and on the device are what is computed, what is on its way, and the newest `keep`
    micro-batches.

    A worker whose peak memory would not be smaller moves nothing.

    Args:
        schedule: a valid schedule without ``O`` and without transfers; recomputation must be added before.
        costs: times and memory. None: each action takes a unit of time, ``B`` two, each ``O`` and ``L`` one; the input
            of a stage is an eighth of what a micro-batch holds there.
        keep: so many micro-batches of each stage stay, the newest. 0: all move after whose forward something else is
            computed, so that with several stages for a worker less is held than one micro-batch.
        loss_outside: whether the loss is computed outside of the pipe, so that each ``L`` comes after the forwards.

    Returns:
        A schedule of the same name; the same object if nothing moves, as in one for inference.

    Raises:
        ScheduleError: the schedule cannot be executed.
        TypeError: `costs` is no :class:`Costs`.
        ValueError: `keep` is no int of at least 0, the schedule has an ``O``, transfers, or a table without ``O`` and
            ``L``, or the costs are for another number of stages.

    Example:
        >>> from pipework.schedule import Costs, build, simulate
        >>> moving = with_offload(build("1f1b", workers=4, chunks=8))
        >>> print(*moving.orders[0][:12])
        0F0 0O0 0F1 0O1 0F2 0O2 0F3 0O3 0L0 0B0 0L1 0F4
        >>> found = simulate(moving, Costs(offload=1, reload=1))
        >>> found.makespan, found.peak_memory
        (33.0, (2.0, 2.0, 2.0, 1.0))
    """
    if type(keep) is not int or keep < 0:
        raise ValueError(f"keep is {keep!r}: wanted an integer of at least 0")
    copies = set(schedule.table.letters(scope="copy"))
    if schedule.communicates or not copies.isdisjoint(schedule.kinds):
        why = "transfers" if schedule.communicates else "copies to the host"
        raise ValueError(f"schedule {schedule.name!r} has {why}: offload in one without, before transfers")
    if not {"O", "L"} <= copies:
        raise ValueError(f"the table of schedule {schedule.name!r} has no O and L: make it of those of KINDS")
    check(schedule, costs)
    if schedule.inference:
        return schedule
    spread = (_USUAL if costs is None else costs).spread(schedule.stages, len(schedule.skips))
    ended, inputs = run(schedule, spread), recomputed(schedule)
    orders = []
    for worker, order in enumerate(schedule.orders):
        moves = _moves(schedule, worker, keep, inputs)
        loads = _loads(schedule, worker, moves, ended, spread, inputs, after_forwards=loss_outside)
        orders.append(tuple(_with_copies(order, moves, loads)))
    moving = replace(schedule, orders=tuple(orders))
    # Memory depends on the order of its worker alone, and so does whether copies can run.
    pays = [_peak(moving, n, spread) * SLACK < _peak(schedule, n, spread) for n in range(schedule.workers)]
    orders = [new if pay else old for new, old, pay in zip(orders, schedule.orders, pays, strict=True)]
    return replace(schedule, orders=tuple(orders)) if any(pays) else schedule


def _moves(schedule: Schedule, worker: int, keep: int, inputs: Set[tuple[int, int]]) -> Mapping[int, int]:
    """The positions of what needs a micro-batch that moves: its recompute, or its backward; to that of its forward."""
    forwards = schedule.table.letters(gives="F")
    needing = set(schedule.table["L"].before)
    begun: Counter[int] = Counter()
    made: dict[tuple[int, int], tuple[int, int]] = {}
    found: dict[int, int] = {}
    for position, (kind, stage, micro_batch, _) in enumerate(schedule.orders[worker]):
        if kind in forwards:
            begun[stage] += 1
            made[stage, micro_batch] = position, begun[stage]
        elif kind in needing and (stage, micro_batch) in made:
            forward, number = made.pop((stage, micro_batch))
            of_caller = stage == 0 and (stage, micro_batch) in inputs
            if begun[stage] - number >= keep and position > forward + 1 and not of_caller:
                found[position] = forward
    return found


def _loads(
    schedule: Schedule,
    worker: int,
    moves: Mapping[int, int],
    ended: Run,
    costs: StageCosts,
    inputs: Set[tuple[int, int]],
    *,
    after_forwards: bool,
) -> Mapping[int, list[Action]]:
    """The loads before each position: from the last to the first, each as late as it can be to end in time."""
    order, table = schedule.orders[worker], schedule.table
    # When the worker comes to each position.
    ends = (0.0 if table[action[0]].beside else end for action, end in zip(order, ended.ends[worker], strict=True))
    reached = list(accumulate(ends, max, initial=0.0))
    before_loss = (n for n, action in enumerate(order) if after_forwards and table[action[0]].phase == "forward")
    first, last = 1 + max(before_loss, default=-1), len(order)
    rounding = 1e-9 * reached[-1]
    found: dict[int, list[Action]] = defaultdict(list)
    free = inf
    for position in sorted(moves, reverse=True):
        _, stage, micro_batch, _ = order[position]
        time = copy_time(costs, "reload", stage, inputs=(stage, micro_batch) in inputs)
        free = min(free, ended.starts[worker][position]) - time
        last = min(last, position)
        while last > first and reached[last] > free + rounding:
            last -= 1
        slot = min(position, max(last, moves[position] + 1))
        found[slot].insert(0, Action("L", stage, micro_batch))
    return found


def _with_copies(
    order: tuple[Action, ...], moves: Mapping[int, int], loads: Mapping[int, list[Action]]
) -> Iterator[Action]:
    leaving = set(moves.values())
    for position, action in enumerate(order):
        yield from loads.get(position, ())
        yield action
        if position in leaving:
            yield action._replace(kind="O")


def _peak(schedule: Schedule, worker: int, costs: StageCosts) -> float:
    return max(amounts(schedule, schedule.orders[worker], costs)[0], default=0.0)
