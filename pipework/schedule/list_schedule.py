"""List scheduling: from priorities to orders, within a limit of memory, with weight halves in the gaps."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import Literal, NamedTuple, get_args

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.costs import Costs, checked
from pipework.schedule.phases import Orders

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
    spread = checked(costs).spread(len(placement))
    ready = _Ready(placement, priorities, spread.transfer)
    workers = [_Worker(each, limit, overtaking, ready) for each in priorities]
    events = [(0.0, number) for number in range(len(workers))]  # a heap: the time to look at a worker, its number
    while events:
        time, number = heappop(events)
        worker = workers[number]
        if worker.free > time:
            continue
        action = worker.start(time)
        if action is None:
            continue
        kind, stage, _, _ = action
        worker.free = time + spread.duration[kind][stage]
        heappush(events, (worker.free, number))
        arrival = ready.record(action, worker.free)
        # A busy worker has an event at its end; an idle one, or one that looked at this moment before, needs one.
        if arrival is not None and workers[arrival[1]].free <= arrival[0]:
            heappush(events, arrival)
    left = sum(map(len, priorities)) - sum(action.kind != "W" for worker in workers for action in worker.order)
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
        found = {(action.stage, action.kind == "F") for action in own}
        stages = [stage for stage, home in enumerate(placement) if home == worker]
        wanted = {(stage, forward) for stage in stages for forward in (True, False)}
        if found != wanted:
            stage, forward = min(found ^ wanted)
            lacks, holds = ("lack a", "holds") if (stage, forward) in wanted else ("contain a", "does not hold")
            which = f"{'forward' if forward else 'backward'} of stage {stage}"
            raise ValueError(f"the priorities of worker {worker} {lacks} {which}, which it {holds}")


class _Ready:
    """When the data of each forward and backward arrives; infinity if that is not known yet."""

    def __init__(
        self, placement: Sequence[int], priorities: Sequence[Sequence[Action]], transfer: Sequence[float]
    ) -> None:
        self._placement = placement
        self._transfer = transfer
        last = max(micro_batch for each in priorities for _, _, micro_batch, _ in each)
        self.forward = [[inf if stage else 0.0] * (last + 1) for stage in range(len(placement))]
        self.backward = [[inf] * (last + 1) for _ in placement]

    def record(self, action: Action, end: float) -> tuple[float, int] | None:
        """Records the result of an action; returns when it arrives at which other worker, or None."""
        kind, stage, micro_batch, _ = action
        if kind == "W":
            return None
        step, at = (1, self.forward) if kind == "F" else (-1, self.backward)
        receiver = stage + step
        if receiver == len(self._placement):
            self.backward[stage][micro_batch] = end  # the loss
        if not 0 <= receiver < len(self._placement):
            return None
        if self._placement[receiver] == self._placement[stage]:
            at[receiver][micro_batch] = end
            return None
        at[receiver][micro_batch] = arrival = end + self._transfer[min(stage, receiver)]
        return arrival, self._placement[receiver]


class _Lane(NamedTuple):
    """The priorities of one stage in one direction, of which only the first can be next."""

    ranked: deque[tuple[int, Action]]
    arrivals: Sequence[float]
    room: float  # the next action may start if the worker holds at most this many activations


class _Worker:
    """A worker's remaining priorities, and its order so far."""

    def __init__(self, priorities: Sequence[Action], limit: int, overtaking: Overtaking, ready: _Ready) -> None:
        self.free = 0.0
        self.order: list[Action] = []
        self._waits = {"none": "FBI", "backwards": "F", "all": ""}[overtaking]
        self._held = 0
        self._weights: deque[Action] = deque()
        lanes: dict[tuple[int, bool], _Lane] = {}
        stages = sorted({action.stage for action in priorities})
        for position, stage in enumerate(stages):
            reserve = len(stages) - position - 1 if overtaking == "all" else 0
            lanes[stage, True] = _Lane(deque(), ready.forward[stage], limit - reserve - 1)
            lanes[stage, False] = _Lane(deque(), ready.backward[stage], inf)
        for rank, action in enumerate(priorities):
            lanes[action.stage, action.kind == "F"].ranked.append((rank, action))
        self._lanes = tuple(lanes.values())
        self._heads = sorted((lane.ranked[0][0], number) for number, lane in enumerate(self._lanes))

    def start(self, time: float) -> Action | None:
        """Starts an action, if one is possible now."""
        action = self._first_possible(time)
        if action is None:
            if not self._weights:
                return None
            action = self._weights.popleft()
        kind, stage, micro_batch, _ = action
        if kind == "F":
            self._held += 1
        elif kind == "I":
            self._weights.append(Action("W", stage, micro_batch))
        else:
            self._held -= 1
        self.order.append(action)
        return action

    def _first_possible(self, time: float) -> Action | None:
        for position, (_, number) in enumerate(self._heads):
            ranked, arrivals, room = self._lanes[number]
            _, action = ranked[0]
            kind, _, micro_batch, _ = action
            if position and kind in self._waits:
                continue
            if arrivals[micro_batch] <= time and self._held <= room:
                ranked.popleft()
                del self._heads[position]
                if ranked:
                    insort(self._heads, (ranked[0][0], number))
                return action
        return None
