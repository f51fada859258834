"""List scheduling: from priorities to orders, within a limit of memory, with weight halves in the gaps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import Literal, get_args

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import one_of, positive_integers
from pipework.schedule.costs import Costs, StageCosts, checked_without_skips
from pipework.schedule.kinds import KINDS
from pipework.schedule.schedule import Orders

Overtaking = Literal["none", "backwards", "all"]
"""Which actions a worker may start before earlier ones of its priorities."""


def list_schedule(
    placement: Sequence[int],
    priorities: Sequence[Sequence[Action]],
    limit: int,
    costs: Costs | None = None,
    *,
    overtaking: Overtaking = "none",
) -> Orders:
    """Simulate workers, each of which starts, when it is free, the first of its priorities that is possible.

    ::

        priorities of worker 0    F0 F1 F2 I0 F3 I1 ...       F2 has its data, but the limit is 2:
        its order             F0 F1 .  .  I0 W0 F2 ...    it waits for W0, which frees a micro-batch

    An action is possible if its data has arrived and, for a forward, if memory is left. If none is possible, the worker
    runs the weight half of its oldest split backward; if there is none, it waits. So weight halves fill the gaps, and
    run when memory is full.

    `overtaking` decides how closely the orders follow the priorities:

    * ``"none"``: a worker only ever starts the first of its remaining priorities. Without ``W``, its order is the list
      of its priorities.
    * ``"backwards"``: a backward may start before its turn. It needs no memory, and another worker waits for it.
    * ``"all"``: forwards may start before their turn, too, as far as memory allows.

    There is no deadlock, for any costs. If forwards keep their turn, the priorities have to ensure that: in some order
    of all workers' priorities together, data is made before it is used, and the limit is kept even if each ``W``
    follows at once. Then the first of the remaining actions in that order is always possible. If forwards may overtake,
    the banker's algorithm ensures it: a forward starts only if memory remains for one more on each later stage of its
    worker, so that all micro-batches that have begun can finish.

    Args:
        placement: the worker of each stage.
        priorities: for each worker its ``F``, and its ``B`` or ``I``, most urgent first; those of one stage and kind
            must have ascending micro-batches.
        limit: the number of activations, each of one micro-batch on one stage, that a worker may hold.
        costs: times, which decide when an action is possible; unit costs if None.
        overtaking: which actions may start before earlier ones of the priorities.

    Returns:
        The orders; every ``I`` is followed, at some distance, by its ``W``.

    Raises:
        TypeError: the limit is not an int, or `costs` is no :class:`Costs`.
        ValueError: the limit is so small that workers deadlock; priorities, or costs, are for other stages than those
            of the placement; or `overtaking` is unknown.

    Example:
        >>> priorities = [[Action(kind, 0, i) for i in range(3) for kind in "FI"]]
        >>> [str(action) for action in list_schedule([0], priorities, limit=2)[0]]
        ['0F0', '0I0', '0F1', '0I1', '0W0', '0F2', '0I2', '0W1', '0W2']
    """
    _check_priorities(placement, priorities)
    positive_integers(limit=limit)
    one_of("overtaking", overtaking, get_args(Overtaking))
    spread = checked_without_skips(costs).spread(len(placement))
    workers = [_Worker(each, limit, overtaking) for each in priorities]
    _run(placement, workers, spread)
    left = sum(map(len, priorities)) - sum(worker.started for worker in workers)
    if left:
        raise ValueError(
            f"deadlock: {left} actions never start if a worker may hold {limit} activations; raise the limit"
        )
    return tuple(tuple(worker.order) for worker in workers)


def _check_priorities(placement: Sequence[int], priorities: Sequence[Sequence[Action]]) -> None:
    """Refuse priorities that do not have forwards and backwards of just the stages of each worker."""
    gives = {letter: row.gives for letter, row in KINDS.items()}
    workers = 1 + max(placement, default=-1)
    if not workers or len(priorities) != workers:
        raise ValueError(f"there are priorities for {len(priorities)} workers, but the placement has {workers}")
    for worker, own in enumerate(priorities):
        stages = [stage for stage, home in enumerate(placement) if home == worker]
        if {(action[1], gives.get(action[0])) for action in own} != {(stage, way) for stage in stages for way in "FB"}:
            raise ValueError(
                f"the priorities of worker {worker} are for other actions than its own: wanted F, and B or I, of the "
                f"stages {stages}"
            )


class _Worker:
    """A worker's remaining priorities, and its order so far."""

    def __init__(self, priorities: Sequence[Action], limit: int, overtaking: Overtaking) -> None:
        self.free = 0.0
        self.order: list[Action] = []
        self.started = 0  # actions of the priorities
        self.priorities = priorities
        self._held = 0
        self._split: deque[Action] = deque()  # the input halves whose weight halves have not been run
        self._rows = dict(KINDS)
        self._forwards_overtake = overtaking == "all"
        # A forward of a stage may start if the worker holds at most this many activations.
        stages = sorted({action.stage for action in priorities})
        reserves = range(len(stages) - 1, -1, -1) if overtaking == "all" else [0] * len(stages)
        self._room = {stage: limit - reserve - 1 for stage, reserve in zip(stages, reserves, strict=True)}
        # The ranks of priorities that keep their order among themselves; only the first of each lane can be next.
        lanes: dict[tuple[str, int], list[int]] = {}
        for rank, (kind, stage, _, _) in enumerate(priorities):
            lane = ("all", -1) if overtaking == "none" else (kind, stage)
            if overtaking == "backwards" and KINDS[kind].phase == "forward":
                lane = (kind, -1)
            lanes.setdefault(lane, []).append(rank)
        self._lanes = [iter(ranks) for ranks in lanes.values()]
        self._heads = sorted((next(ranks), lane) for lane, ranks in enumerate(self._lanes))

    def start(self, time: float, arrivals: _Arrivals) -> Action | None:
        """Takes the first of the priorities that is possible, or else the oldest weight half, if there is one."""
        for position, (rank, lane) in enumerate(self._heads):
            action = self.priorities[rank]
            kind, stage, micro_batch, _ = action
            row = self._rows[kind]
            if arrivals[row.arrives][stage][micro_batch] > time:
                continue
            if row.phase == "forward":
                if self._held > self._room[stage] or (position and not self._forwards_overtake):
                    continue
                self._held += 1
            elif row.partner:
                self._split.append(action)
            else:
                self._held -= 1
            following = next(self._lanes[lane], None)
            self._heads[position : position + 1] = [] if following is None else [(following, lane)]
            self._heads.sort()
            self.started += 1
            break
        else:
            if not self._split:
                return None
            kind, stage, micro_batch, _ = self._split.popleft()
            self._held -= 1
            action = Action(self._rows[kind].partner, stage, micro_batch)
        self.order.append(action)
        return action


_Arrivals = dict[str, list[list[float]]]
"""When the data of the forwards (F) and backwards (B) arrives, for each stage and micro-batch."""


def _run(placement: Sequence[int], workers: Sequence[_Worker], costs: StageCosts) -> None:
    """Let workers start actions, each when it is free and when data arrives, until none can continue."""
    last = max(action.micro_batch for worker in workers for action in worker.priorities)
    arrivals: _Arrivals = {kind: [[inf] * (last + 1) for _ in placement] for kind in "FB"}
    arrivals["F"][0] = [0.0] * (last + 1)
    rows = dict(KINDS)
    # The times at which workers look for an action; of those at the same time, the first worker is first.
    looks = [(0.0, number) for number in range(len(workers))]
    while looks:
        time, number = heappop(looks)
        worker = workers[number]
        action = worker.start(time, arrivals) if worker.free <= time else None
        if action is None:
            continue
        kind, stage, micro_batch, _ = action
        row = rows[kind]
        worker.free = arrival = time + costs[row.cost][stage]
        heappush(looks, (arrival, number))
        # Who gets the result: the next stage, the one before, or the backward of the last stage, from the loss.
        direction, target = row.gives, stage + (1 if row.phase == "forward" else -1)
        if target == len(placement):
            direction, target = "B", stage
        if not direction or target < 0:
            continue
        receiver = placement[target]
        if receiver != number:
            arrival += costs["transfer"][min(stage, target)]
            heappush(looks, (arrival, receiver))
        arrivals[direction][target][micro_batch] = arrival
