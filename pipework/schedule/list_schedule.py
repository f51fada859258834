"""List scheduling: from priorities to orders, within a limit of memory, with weight halves in the gaps."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import Literal, NamedTuple, get_args

from pipework.schedule.action import NONE, Action, make_action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.costs import Costs, StageCosts, checked_without_skips
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
    if overtaking not in get_args(Overtaking):
        raise ValueError(f"overtaking is {overtaking!r}: wanted one of {', '.join(map(repr, get_args(Overtaking)))}")
    spread = checked_without_skips(costs).spread(len(placement))
    workers = [_Worker(each, limit, overtaking) for each in priorities]
    _Execution(placement, workers, spread).finish()
    left = sum(map(len, priorities)) - sum(worker.started for worker in workers)
    if left:
        raise ValueError(
            f"deadlock: {left} actions never start if a worker may hold {limit} activations; raise the limit"
        )
    return tuple(tuple(worker.order) for worker in workers)


def _check_priorities(placement: Sequence[int], priorities: Sequence[Sequence[Action]]) -> None:
    """Refuse priorities that do not have forwards and backwards of just the stages of each worker."""
    workers = 1 + max(placement, default=-1)
    if not workers or len(priorities) != workers:
        raise ValueError(f"there are priorities for {len(priorities)} workers, but the placement has {workers}")
    for worker, own in enumerate(priorities):
        stages = [stage for stage, home in enumerate(placement) if home == worker]
        found = {(action[1], {"F": "F", "B": "B or I", "I": "B or I"}.get(action[0])) for action in own}
        if found != {(stage, kind) for stage in stages for kind in ("F", "B or I")}:
            raise ValueError(
                f"the priorities of worker {worker} are for other actions than its own: wanted F, and B or I, of the "
                f"stages {stages}"
            )


class _Worker:
    """A worker's remaining priorities, and its order so far."""

    __slots__ = ("free", "heads", "held", "lanes", "order", "priorities", "room", "split", "started", "turn")

    def __init__(self, priorities: Sequence[Action], limit: int, overtaking: Overtaking) -> None:
        self.free = 0.0
        self.held = 0
        self.order: list[Action] = []
        self.started = 0  # actions of the priorities
        self.split: deque[Action] = deque()  # the input halves whose weight halves have not been run
        self.priorities = priorities
        self.turn = overtaking == "backwards"  # whether forwards wait for their turn though backwards do not
        # A forward of a stage may start if the worker holds at most this many activations.
        stages = sorted({action.stage for action in priorities})
        reserves = range(len(stages) - 1, -1, -1) if overtaking == "all" else [0] * len(stages)
        self.room = {stage: limit - reserve - 1 for stage, reserve in zip(stages, reserves, strict=True)}
        # The ranks of priorities that keep their order among themselves; only the first of each lane can be next.
        lanes: dict[tuple[bool, int], array[int]] = {}
        for rank, (kind, stage, _, _) in enumerate(priorities):
            forward = kind == "F"
            # Forwards that wait for their turn wait for each other, too.
            apart = overtaking == "all" or (overtaking == "backwards" and not forward)
            lanes.setdefault((forward, stage) if apart else (overtaking == "backwards", -1), array("q")).append(rank)
        self.lanes = [iter(ranks) for ranks in lanes.values()]
        self.heads = sorted((next(ranks), lane) for lane, ranks in enumerate(self.lanes))

    def weight_half(self) -> Action | None:
        """Takes the weight half of the oldest split backward, if there is one."""
        if not self.split:
            return None
        _, stage, micro_batch, _ = self.split.popleft()
        return make_action(("W", stage, micro_batch, NONE))


class _Execution:
    """The workers over time, each of which looks for an action when it is free or data arrives."""

    def __init__(self, placement: Sequence[int], workers: Sequence[_Worker], costs: StageCosts) -> None:
        self._placement = placement
        self._workers = workers
        self._costs = costs
        last = max(micro_batch for worker in workers for _, _, micro_batch, _ in worker.priorities)
        # When the data of each forward and backward arrives; infinity if that is not known yet.
        self._forward = [[inf if stage else 0.0] * (last + 1) for stage in range(len(placement))]
        self._backward = [[inf] * (last + 1) for _ in placement]
        self._receivers = {
            kind: [self._receiver(kind, stage) for stage in range(len(placement))] for kind in ("F", "B", "I")
        }

    def _receiver(self, kind: str, stage: int) -> _Receiver | None:
        """Who gets the result of an action."""
        step, arrivals = (1, self._forward) if kind == "F" else (-1, self._backward)
        target = stage + step
        if target == len(self._placement):
            return _Receiver(self._backward[stage], 0.0, None)  # the loss
        if target < 0:
            return None
        if self._placement[target] == self._placement[stage]:
            return _Receiver(arrivals[target], 0.0, None)
        return _Receiver(arrivals[target], self._costs.transfer[min(stage, target)], self._placement[target])

    def finish(self) -> None:
        """Runs until no worker can continue."""
        workers, receivers, duration = self._workers, self._receivers, self._costs.duration
        # Many workers look at the same time, so there is a heap of times, and for each a heap of the workers' numbers.
        times = [0.0]
        due_at = {0.0: list(range(len(workers)))}

        def add(time: float, number: int) -> None:
            due = due_at.get(time)
            if due is None:
                due_at[time] = [number]
                heappush(times, time)
            else:
                heappush(due, number)

        while times:
            time = heappop(times)
            due = due_at[time]
            while due:
                number = heappop(due)
                worker = workers[number]
                if worker.free > time:
                    continue
                action = self._first_possible(worker, time) or worker.weight_half()
                if action is None:
                    continue
                kind, stage, micro_batch, _ = action
                worker.order.append(action)
                worker.free = end = time + duration[kind][stage]
                add(end, number)
                if kind == "W":
                    worker.held -= 1
                    continue
                worker.started += 1
                if kind == "F":
                    worker.held += 1
                elif kind == "I":
                    worker.split.append(action)
                else:
                    worker.held -= 1
                receiver = receivers[kind][stage]
                if receiver is None:
                    continue
                arrivals, delay, other = receiver
                arrivals[micro_batch] = arrival = end + delay
                # A busy worker looks at its end; an idle one, or one that may have looked just now, has to.
                if other is not None and (workers[other].free < arrival or arrival == time):
                    add(arrival, other)
            del due_at[time]

    def _first_possible(self, worker: _Worker, time: float) -> Action | None:
        heads, priorities = worker.heads, worker.priorities
        for position, (rank, lane) in enumerate(heads):
            action = priorities[rank]
            kind, stage, micro_batch, _ = action
            if kind == "F":
                if position and worker.turn:
                    continue
                if self._forward[stage][micro_batch] > time or worker.held > worker.room[stage]:
                    continue
            elif self._backward[stage][micro_batch] > time:
                continue
            following = next(worker.lanes[lane], None)
            if following is None:
                del heads[position]
            else:
                heads[position] = (following, lane)
                heads.sort()
            return action
        return None


class _Receiver(NamedTuple):
    """Who gets the result of an action.

    Attributes:
        arrivals: when it arrives, for each micro-batch.
        delay: the time of its transfer.
        worker: the other worker that it goes to; None if it stays.
    """

    arrivals: list[float]
    delay: float
    worker: int | None
