"""List scheduling with a key for each operation, a limit of memory, and a banker's reserve.

Of the operations that a worker could start when it is free, it starts the forward or gradient with the smallest key.
If there is none, it runs a weight half; if there is none either, it waits.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from typing import NamedTuple

from pipework_synthesis.problem import Orders, Problem

Keys = list["array[float]"]
"""For each lane, which is ``kind * stages + stage``, a key for each micro-batch, ascending."""


class Policy(NamedTuple):
    """What a worker does besides following its keys.

    Attributes:
        turns: whether a forward keeps its turn: it starts only after all operations with smaller keys.
        patience: a worker that could run a weight half waits instead if data arrives within this share of its time.
        weights_first: whether a weight half runs before other operations if it makes room for the one with the
            smallest key.
        planned_weights: whether a weight half starts in the turn that its key gives it, too, and not only in gaps.
    """

    turns: bool = False
    patience: float = 0.0
    weights_first: bool = False
    planned_weights: bool = False


def pattern_keys(problem: Problem, offsets: list[float], period: float) -> Keys:
    """Keys of a pattern that repeats: ``offset of the lane + period * micro-batch``."""
    steps = [period * micro_batch for micro_batch in range(problem.micro_batches)]
    return [array("d", (offset + step for step in steps)) for offset in offsets]


def reserves(problem: Problem) -> list[float]:
    """The room that must remain on the worker of each stage when a forward of it has ended.

    With it, the oldest micro-batch can always go on: to the later stages of the worker, and back through all of them.
    """
    result = [0.0] * problem.stages
    peak, resting = problem.peaks, problem.resting
    least = list(map(min, problem.active, problem.small))
    for stages in problem.own():
        following = 0.0  # what the next stage's forward needs: room while it runs, and what must remain then
        for position in range(len(stages) - 1, -1, -1):
            stage = stages[position]
            back = max(peak[each] - least[each] for each in stages[: position + 1])
            result[stage] = max(back, following)
            following = max(peak[stage], resting[stage] + result[stage])
    return result


def greedy_orders(problem: Problem, keys: Keys, policy: Policy = Policy()) -> tuple[float, Orders] | None:  # noqa: B008
    """Simulate the workers.

    Returns:
        The time at which the last operation ends, and the orders; None in a deadlock, which only a policy with turns
        can have.
    """
    stages, m, split = problem.stages, problem.micro_batches, problem.split
    turns, patience, weights_first, planned_weights = policy
    last = stages - 1
    placement, limits, again, leads = problem.placement, problem.limits, problem.again, problem.leads
    forward, gradient = problem.times[0], problem.times[1]
    weight = problem.times[2] if split else (0.0,) * stages
    active, waiting = problem.active, problem.waiting
    raised = [max(0.0, late - early) for late, early in zip(waiting, active, strict=True)]
    # What a forward needs: room while it runs, and room that remains afterwards.
    reserve = reserves(problem)
    small = problem.small
    # The most that may be held before a forward, whose micro-batch is checkpointed or not.
    admits = [
        [limits[placement[s]] - max(active[s], after + reserve[s]) for s, after in enumerate(held_after)]
        for held_after in (active, small)
    ]
    hops = problem.hops
    # If a worker holds so many, they are all of the micro-batch whose forward is next, which always has room.
    position = [problem.placement[:s].count(worker) for s, worker in enumerate(placement)]
    own = problem.own()
    lanes = [[(s, keys[s], keys[stages + s]) for s in each] for each in own]
    arrived: list[list[float]] = [[] for _ in range(stages)]  # of forwards
    arrived[0] = [0.0] * m
    returned: list[list[float]] = [[] for _ in range(stages)]  # of gradients
    done = [0] * (3 * stages)  # of each lane
    held = [0.0] * len(own)
    alone = [0] * len(own)  # micro-batches x stages that are held
    free = [0.0] * len(own)
    orders: Orders = [[] for _ in own]
    events = [(0.0, worker) for worker in range(len(own))]
    infinite = float("inf")
    while events:
        time, worker = heappop(events)
        if free[worker] > time:
            continue
        best = top = infinite
        choice = -1
        blocked = False
        soon = infinite
        room = held[worker]
        for s, of_forward, of_gradient in lanes[worker]:
            i = done[s]
            if i < m:
                key = of_forward[i]
                here = arrived[s]
                if key < top:
                    top = key
                    blocked = False
                if i < len(here):
                    if room <= admits[again[s][i]][s] or alone[worker] == position[s]:
                        if here[i] > time:
                            soon = here[i] if here[i] < soon else soon
                        elif key < best:
                            best, choice = key, s
                    elif here[i] <= time and key <= top:
                        blocked = True
            i = done[stages + s]
            if i < m:
                key = of_gradient[i]
                here = returned[s]
                if key < top:
                    top = key
                    blocked = False
                if i < len(here):
                    arrival = here[i] - leads[s] if again[s][i] else here[i]
                    if arrival > time:
                        soon = arrival if arrival < soon else soon
                    elif key < best:
                        more = active[s] - small[s] + raised[s] if again[s][i] else raised[s]
                        if more <= 0.0 or room + more <= limits[worker]:
                            best, choice = key, stages + s
        if choice >= 0 and turns and choice < stages and best > top:
            # A forward that has to keep its turn: only a gradient may go before.
            best, choice = infinite, -1
            for s, _, of_gradient in lanes[worker]:
                i = done[stages + s]
                if i < m and of_gradient[i] < best and i < len(returned[s]):
                    arrival = returned[s][i] - leads[s] if again[s][i] else returned[s][i]
                    if arrival <= time and (
                        (raised[s] <= 0.0 and not again[s][i]) or room + active[s] + raised[s] <= limits[worker]
                    ):
                        best, choice = of_gradient[i], stages + s
        if split and (choice < 0 or planned_weights or (weights_first and blocked)):
            oldest, which = infinite, -1
            for s, _, _ in lanes[worker]:
                i = done[2 * stages + s]
                if i < done[stages + s] and keys[2 * stages + s][i] < oldest:
                    oldest, which = keys[2 * stages + s][i], s
            if which >= 0:
                if choice < 0:
                    if patience and soon < time + patience * weight[which]:
                        heappush(events, (soon, worker))
                        continue
                    choice = 2 * stages + which
                elif (weights_first and blocked) or oldest < best:
                    choice = 2 * stages + which
        if choice < 0:
            continue
        i = done[choice]
        done[choice] = i + 1
        orders[worker].append(choice * m + i)
        if choice < stages:
            s = choice
            end = time + forward[s]
            held[worker] = room + (small[s] if again[s][i] else active[s])
            alone[worker] += 1
            if s == last:
                returned[s].append(end)
            else:
                arrival = end + hops[s]
                arrived[s + 1].append(arrival)
                other = placement[s + 1]
                if other != worker and free[other] <= arrival:
                    heappush(events, (arrival, other))
        elif choice < 2 * stages:
            s = choice - stages
            here = returned[s]
            if again[s][i]:
                start = time + leads[s]
                end = (here[i] if here[i] > start else start) + gradient[s]
                room += active[s] - small[s]
            else:
                end = time + gradient[s]
            if split:
                held[worker] = room + waiting[s] - active[s]
            else:
                held[worker] = room - active[s]
                alone[worker] -= 1
            if s:
                arrival = end + hops[s - 1]
                returned[s - 1].append(arrival)
                other = placement[s - 1]
                if other != worker and free[other] <= arrival:
                    heappush(events, (arrival, other))
                    if again[s - 1][i] and leads[s - 1]:
                        heappush(events, (max(time, arrival - leads[s - 1]), other))
        else:
            s = choice - 2 * stages
            end = time + weight[s]
            held[worker] = room - waiting[s]
            alone[worker] -= 1
        if not alone[worker]:
            held[worker] = 0.0
        free[worker] = end
        heappush(events, (end, worker))
    if sum(map(len, orders)) < problem.operations:
        return None
    return max(free), orders
