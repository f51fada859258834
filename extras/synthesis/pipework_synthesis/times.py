"""The earliest and latest times of operations, given their orders."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipework_synthesis.problem import FORWARD, GRADIENT, WEIGHT, Orders, Problem


@dataclass(frozen=True)
class TimedOrders:
    """Orders of operations, with their times.

    Attributes:
        orders: of each worker.
        starts: the earliest start of each operation; of a gradient after a recomputation that of the recomputation, as
            late as it may be.
        ends: the earliest end.
        sequence: all operations in an order in which data is made before it is used.
        makespan: the latest end.
    """

    orders: Orders
    starts: array[float]
    ends: array[float]
    sequence: Sequence[int]
    makespan: float


class Times:
    """Computes times of orders for one problem.

    There may be millions of operations, so what each of them has is kept in arrays.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        m, stages = problem.micro_batches, problem.stages
        last = stages - 1
        self.time = array("d")
        self.lead = array("d")
        self.before = array("q")  # the operation whose result an operation needs, -1: none
        self.lag = array("d")  # and how long that takes to arrive
        for kind in problem.kinds:
            for stage in range(stages):
                lane = kind * stages + stage
                before, lag = -1, 0.0
                if kind == FORWARD and stage:
                    before, lag = lane - 1, problem.hops[stage - 1]
                elif kind == GRADIENT:
                    before, lag = (last, 0.0) if stage == last else (lane + 1, problem.hops[stage])
                elif kind == WEIGHT:
                    before = lane - stages
                self.time.extend(itertools.repeat(problem.times[kind][stage], m))
                again = problem.again[stage] if kind == GRADIENT else bytes(m)
                self.lead.extend(problem.leads[stage] if each else 0.0 for each in again)
                self.before.extend(range(before * m, before * m + m) if before >= 0 else itertools.repeat(-1, m))
                self.lag.extend(itertools.repeat(lag, m))

    def plan(self, orders: Orders) -> TimedOrders | None:
        """The earliest times; None if the orders have a deadlock."""
        time, lead, before, lag = self.time, self.lead, self.before, self.lag
        ends = array("d", [-1.0]) * len(time)
        starts = array("d", [0.0]) * len(time)
        sequence: list[int] = []
        reached = [0] * len(orders)
        clocks = [0.0] * len(orders)
        waits: dict[int, int] = {}
        awake = list(range(len(orders)))[::-1]
        while awake:
            worker = awake.pop()
            order, clock = orders[worker], clocks[worker]
            for position in range(reached[worker], len(order)):
                operation = order[position]
                needed = before[operation]
                ahead = lead[operation]
                begin = clock + ahead
                if needed >= 0:
                    arrival = ends[needed]
                    if arrival < 0.0:
                        waits[needed] = worker
                        reached[worker] = position
                        break
                    arrival += lag[operation]
                    if arrival > begin:
                        begin = arrival
                starts[operation] = begin - ahead
                clock = begin + time[operation]
                ends[operation] = clock
                sequence.append(operation)
                if operation in waits:
                    awake.append(waits.pop(operation))
            else:
                reached[worker] = len(order)
            clocks[worker] = clock
        if len(sequence) < len(time):
            return None
        return TimedOrders(orders, starts, ends, sequence, max(clocks))

    def latest_starts(self, plan: TimedOrders, end: float) -> array[float]:
        """The latest start of each operation with which all end by `end`; of its lead, if it has one."""
        time, lead, before, lag = self.time, self.lead, self.before, self.lag
        latest = array("d", [end]) * len(time)  # ends
        starts = array("d", [0.0]) * len(time)
        previous = array("q", [-1]) * len(time)
        for order in plan.orders:
            for one, other in itertools.pairwise(order):
                previous[other] = one
        for operation in reversed(plan.sequence):
            start = latest[operation] - time[operation]
            needed = before[operation]
            if needed >= 0 and start - lag[operation] < latest[needed]:
                latest[needed] = start - lag[operation]
            start -= lead[operation]
            starts[operation] = start
            needed = previous[operation]
            if needed >= 0 and start < latest[needed]:
                latest[needed] = start
        return starts

    @cached_property
    def changes(self) -> tuple[array[float], array[float]]:
        """For each operation the memory above that before it while it runs, and after it."""
        problem = self.problem
        peaks, changes = array("d"), array("d")
        m = problem.micro_batches
        for kind in problem.kinds:
            for stage in range(problem.stages):
                active, small, waiting = problem.active[stage], problem.small[stage], problem.waiting[stage]
                for micro_batch in range(m):
                    again = problem.again[stage][micro_batch]
                    if kind == FORWARD:
                        peaks.append(max(active, small) if again else active)
                        changes.append(small if again else active)
                    elif kind == GRADIENT:
                        more = active - small if again else 0.0
                        late = waiting if problem.split else 0.0
                        peaks.append(max(0.0, more, more + (waiting - active if problem.split else 0.0)))
                        changes.append(more + late - active)
                    else:
                        peaks.append(0.0)
                        changes.append(-waiting)
        return peaks, changes

    def fits(self, orders: Orders) -> bool:
        """Whether no worker exceeds its limit."""
        peaks, changes = self.changes
        for worker, order in enumerate(orders):
            limit, held = self.problem.limits[worker] + 1e-9, 0.0
            for operation in order:
                if held + peaks[operation] > limit:
                    return False
                held += changes[operation]
        return True
