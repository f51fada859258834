"""List scheduling: from priorities to orders, within a limit of memory, and with weight halves in the gaps."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import Literal, NamedTuple, get_args

from pipework.schedule.action import Action
from pipework.schedule.checks import positive_integer
from pipework.schedule.costs import Costs, checked
from pipework.schedule.phases import Orders

Overtaking = Literal["none", "backwards", "all"]
"""Which priorities may be taken before others that come first."""


def list_schedule(
    placement: Sequence[int],
    priorities: Sequence[Sequence[Action]],
    limit: int,
    costs: Costs | None = None,
    *,
    overtaking: Overtaking = "none",
) -> Orders:
    """Let every worker take, whenever it is free, the first of its priorities that it can.

    ::

        priorities of worker 0    F0 F1 F2 I0 F3 I1 ...       F2 has its data, but the limit is 2:
        its order             F0 F1 .  .  I0 W0 F2 ...    it waits for W0, which frees a micro-batch

    A wish can be taken if its data is there and, for a forward, if memory is left. Failing that, the worker runs
    the weight half of the oldest backward that was split, and failing that, it waits. So weight halves fill the gaps,
    and come by force where memory is full.

    Who may overtake decides how faithful the orders are to the priorities:

    * ``"none"``: only the first of all priorities that are left is ever taken. The priorities are the order, but for
      ``W``.
    * ``"backwards"``: a backward may come before its turn. It needs no memory, and somebody waits for it.
    * ``"all"``: forwards run ahead, too, as far as memory goes. The priorities are mere preferences.

    No worker waits for ever, whatever the costs. If forwards keep their turn, that is up to the priorities: in some
    order of all workers' priorities together, data comes before its use, and the limit is kept even if each ``W``
    follows at once. Of the priorities that are left, the first in that order can always be taken. If they do not keep
    it, it is up to the banker's algorithm: a forward is taken only if there is room left for one more on each later
    stage of its worker, so that what has begun can go through.

    Args:
        placement: the worker of each stage.
        priorities: of each worker, its ``F``, and ``B`` or ``I``, in the order of preference; in that order, those of
            one stage and one kind must have ascending micro-batches.
        limit: how many activations, of one micro-batch on one stage each, a worker may hold.
        costs: times, which decide what can be taken when; unit costs if None.
        overtaking: what may be taken though an earlier wish is left.

    Returns:
        The orders; every ``I`` has its ``W`` somewhere behind it.

    Raises:
        TypeError: the limit is not an int, or costs are not Costs.
        ValueError: with so small a limit, the priorities cannot all be fulfilled; there are priorities for other stages
            than those of the placement, or costs; or there is no such way to overtake.

    Example:
        >>> priorities = [[Action(kind, 0, i) for i in range(3) for kind in "FI"]]
        >>> [str(action) for action in list_schedule([0], priorities, limit=2)[0]]
        ['0F0', '0I0', '0F1', '0I1', '0W0', '0F2', '0I2', '0W1', '0W2']
    """
    _check_wishes(placement, priorities)
    positive_integer("limit", limit)
    if overtaking not in get_args(Overtaking):
        raise ValueError(f"overtaking is {overtaking!r}: wanted one of {', '.join(map(repr, get_args(Overtaking)))}")
    spread = checked(costs).spread(len(placement))
    ready = _Ready(placement, priorities, spread.transfer)
    workers = [_Worker(each, limit, overtaking, ready) for each in priorities]
    events = [(0.0, number) for number in range(len(workers))]  # when to look at which worker; a heap
    while events:
        time, number = heappop(events)
        worker = workers[number]
        if worker.free > time:
            continue
        action = worker.take(time)
        if action is None:
            continue
        kind, stage, _, _ = action
        worker.free = time + spread.duration[kind][stage]
        heappush(events, (worker.free, number))
        arrival = ready.tell(action, worker.free)
        # A worker that is busy will look by itself; one that is free at that very moment may have looked before.
        if arrival is not None and workers[arrival[1]].free <= arrival[0]:
            heappush(events, arrival)
    left = sum(map(len, priorities)) - sum(action.kind != "W" for worker in workers for action in worker.order)
    if left:
        raise ValueError(f"{left} actions wait for ever if a worker may hold {limit} activations: raise the limit")
    return tuple(tuple(worker.order) for worker in workers)


def _check_wishes(placement: Sequence[int], priorities: Sequence[Sequence[Action]]) -> None:
    """Each worker has priorities for both directions of all of its stages, and for no others."""
    workers = 1 + max(placement, default=-1)
    if not workers or len(priorities) != workers:
        raise ValueError(f"there are priorities for {len(priorities)} workers, but the placement has {workers}")
    for worker, own in enumerate(priorities):
        found = {(action.stage, action.kind == "F") for action in own}
        wanted = {(stage, way) for stage, home in enumerate(placement) if home == worker for way in (True, False)}
        if found != wanted:
            stage, forward = min(found ^ wanted)
            number, holds = ("no", "holds") if (stage, forward) in wanted else ("a", "does not hold")
            which = f"{'forward' if forward else 'backward'} of stage {stage}"
            raise ValueError(f"worker {worker} has {number} wish for a {which}, which it {holds}")


class _Ready:
    """When the data of forwards and backwards arrives: infinity as long as nobody knows."""

    def __init__(
        self, placement: Sequence[int], priorities: Sequence[Sequence[Action]], transfer: Sequence[float]
    ) -> None:
        self._placement = placement
        self._transfer = transfer
        last = max(micro_batch for each in priorities for _, _, micro_batch, _ in each)
        self.forward = [[inf if stage else 0.0] * (last + 1) for stage in range(len(placement))]
        self.backward = [[inf] * (last + 1) for _ in placement]

    def tell(self, action: Action, end: float) -> tuple[float, int] | None:
        """Notes what an action makes; returns when it arrives at which other worker, if at any."""
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
    """The priorities of one stage in one direction: only the first of them can be next."""

    ranked: deque[tuple[int, Action]]
    arrivals: Sequence[float]
    room: float  # the worker may hold so many activations before the next wish


class _Worker:
    """A worker's priorities that are left, and what it has done."""

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

    def take(self, time: float) -> Action | None:
        """Takes the action that this worker starts now, if there is one."""
        action = self._wish(time)
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

    def _wish(self, time: float) -> Action | None:
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
