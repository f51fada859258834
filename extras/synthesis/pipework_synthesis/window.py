"""Window search: a part of a schedule is scheduled anew by a solver, so that what is after it can start earlier.

::

    worker 0  | frozen    |    window    |   shifted together
    worker 1  | frozen  |      window      |    shifted together
              earliest times         latest times, moved by the shift

What is before the window keeps its times, the earliest ones. What is after it keeps its order and its distances; its
times are the latest ones, so that all slack is in the window. The solver makes the shift as large as it can.
"""

from __future__ import annotations

from array import array
from math import floor, isfinite
from typing import Any, NamedTuple

from pipework_synthesis.problem import GRADIENT, Orders
from pipework_synthesis.solving import Amounts, SolverEffort, solve
from pipework_synthesis.times import TimedOrders, Times


class Window(NamedTuple):
    """A window of a plan, from an earliest start to a latest start."""

    begin: float
    end: float


class WindowCut(NamedTuple):
    """The operations of each worker before, within and after a window."""

    before: Orders
    inside: Orders
    after: Orders


class Improved(NamedTuple):
    """What the solver made of a window.

    Attributes:
        plan: one that is no slower, and may be another one; None if the solver found none in time.
        optimal: whether it has proven that the window has none better.
        bound: no schedule with the same operations before and after the window ends earlier.
    """

    plan: TimedOrders | None
    optimal: bool
    bound: float


def improved(
    times: Times, plan: TimedOrders, window: Window, amounts: Amounts, effort: SolverEffort, *, compact: bool = True
) -> Improved:
    """Schedule a window anew.

    Args:
        times: of a problem in integers.
        plan: a plan that fits the limits.
        window: what is scheduled.
        amounts: memory in integers.
        effort: how long the solver may search.
        compact: whether all workers end the window as early as they can, besides those that delay the shift. Without,
            the bound is better.
    """
    latest = times.latest_starts(plan, plan.makespan)
    cut = _cut(plan, latest, window)
    if sum(map(len, cut.inside)) < 2:
        return Improved(None, True, plan.makespan)
    return _Model(times, plan, latest, cut, amounts, compact=compact).solved(effort)


def improved_between(
    times: Times, plan: TimedOrders, cut: WindowCut, amounts: Amounts, effort: SolverEffort
) -> Improved:
    """As :func:`improved`, for given operations; those of each worker follow each other."""
    latest = times.latest_starts(plan, plan.makespan)
    return _Model(times, plan, latest, cut, amounts, compact=True).solved(effort)


def size(times: Times, plan: TimedOrders, latest: array[float], window: Window) -> int:
    """The number of operations in a window."""
    return sum(map(len, _cut(plan, latest, window).inside))


def _cut(plan: TimedOrders, latest: array[float], window: Window) -> WindowCut:
    before: Orders = []
    inside: Orders = []
    after: Orders = []
    starts = plan.starts
    for order in plan.orders:
        first = next((k for k, operation in enumerate(order) if starts[operation] >= window.begin), len(order))
        rest = range(first, len(order))
        last = next((k for k in rest if latest[order[k]] >= window.end), len(order))
        before.append(order[:first])
        inside.append(order[first:last])
        after.append(order[last:])
    return WindowCut(before, inside, after)


class _Model:
    """The solver's model of a window."""

    def __init__(
        self, times: Times, plan: TimedOrders, latest: array[float], cut: WindowCut, amounts: Amounts, *, compact: bool
    ) -> None:
        from ortools.sat.python import cp_model

        self._times, self._plan, self._latest, self._cut, self._amounts = times, plan, latest, cut, amounts
        self._model = model = cp_model.CpModel()
        self._ends: dict[int, Any] = {}
        self._intervals: dict[int, Any] = {}
        self._leads: dict[int, Any] = {}
        self._before = {operation for own in cut.before for operation in own}
        self._inside = {operation for own in cut.inside for operation in own}
        self._most = round(max((latest[op] for own in cut.inside for op in own), default=0.0) + max(times.time) + 1)
        slack = round(max(0.0, plan.makespan))
        self._shift = model.new_int_var(0, slack, "shift")
        self._order()
        self._data()
        gaps = self._after()
        for worker in range(len(cut.inside)):
            self._memory(worker)
        self._scale = 4 * len(gaps) + 1 if compact else 1
        model.maximize(self._scale * self._shift + (sum(gaps) if compact else 0))

    def _order(self) -> None:
        """Operations of one worker do not overlap, and those of a lane ascend."""
        times, model = self._times, self._model
        m = times.problem.micro_batches
        for before, own in zip(self._cut.before, self._cut.inside, strict=True):
            free = round(self._plan.ends[before[-1]]) if before else 0
            for operation in own:
                duration, lead = round(times.time[operation]), round(times.lead[operation])
                end = model.new_int_var(free + lead + duration, self._most, "")
                model.add_hint(end, round(self._plan.ends[operation]))
                self._ends[operation] = end
                if lead:
                    start = model.new_int_var(free, self._most, "")
                    length = model.new_int_var(lead + duration, self._most, "")
                    interval = model.new_interval_var(start, length, end, "")
                    model.add_hint(start, round(self._plan.starts[operation]))
                    model.add_hint(length, round(self._plan.ends[operation] - self._plan.starts[operation]))
                    self._leads[operation] = start
                else:
                    interval = model.new_interval_var(end - duration, duration, end, "")
                self._intervals[operation] = interval
            model.add_no_overlap([self._intervals[operation] for operation in own])
            for operation in own:
                if operation % m and operation - 1 in self._inside:
                    model.add(self._start(operation) >= self._ends[operation - 1])

    def _start(self, operation: int) -> Any:
        """When the worker begins with an operation of the window."""
        if operation in self._leads:
            return self._leads[operation]
        return self._ends[operation] - round(self._times.time[operation])

    def _data(self) -> None:
        """Operations of the window start after their data has arrived."""
        times, model = self._times, self._model
        problem = times.problem
        for operation in self._inside:
            start = self._ends[operation] - round(times.time[operation])
            needed = times.before[operation]
            if needed >= 0:
                lag = round(times.lag[operation])
                if needed in self._inside:
                    model.add(start >= self._ends[needed] + lag)
                else:
                    model.add(start >= round(self._plan.ends[needed]) + lag)
            if operation in self._leads:  # the recomputation is after the forward
                forward = operation - GRADIENT * problem.stages * problem.micro_batches
                if forward in self._inside:
                    model.add(self._leads[operation] >= self._ends[forward])

    def _after(self) -> list[Any]:
        """What is after the window starts when the window, and its data, are done; returns each worker's idle time."""
        times, model, latest = self._times, self._model, self._latest
        gaps = []
        for before, own, after in zip(self._cut.before, self._cut.inside, self._cut.after, strict=True):
            first = round(latest[after[0]]) if after else round(self._plan.makespan)
            if own:
                gap = model.new_int_var(0, self._most * 2, "")
                for operation in own:
                    model.add(self._ends[operation] + gap <= first - self._shift)
                gaps.append(gap)
            else:
                free = round(self._plan.ends[before[-1]]) if before else 0
                model.add(self._shift <= first - free)
            for operation in after:
                needed = times.before[operation]
                if needed < 0:
                    continue
                start = round(latest[operation]) + round(times.lead[operation]) - round(times.lag[operation])
                if needed in self._inside:
                    model.add(self._ends[needed] <= start - self._shift)
                elif needed in self._before:
                    model.add(self._shift <= start - round(self._plan.ends[needed]))
        return gaps

    def _memory(self, worker: int) -> None:
        """The worker holds no more than its limit."""
        amounts, times, model = self._amounts, self._times, self._model
        whole_limit = amounts.limits[worker]
        if whole_limit is None:
            return
        own = self._cut.inside[worker]
        if not own:
            return
        problem = times.problem
        m, stages = problem.micro_batches, problem.stages
        lowest = round(self._plan.ends[self._cut.before[worker][-1]]) if self._cut.before[worker] else 0
        touched = {(op // m % stages, op % m) for op in own}
        begun = set(self._cut.before[worker])
        held: set[tuple[int, int]] = set()
        constant = 0
        intervals: list[Any] = []
        demands: list[int] = []

        def moment(point: tuple[int, int]) -> Any:
            """The start (0), end (1) or start of computation (2) of an operation; None: outside of the window."""
            operation, which = point
            if operation not in self._inside:
                return None
            if which == 1:
                return self._ends[operation]
            return self._start(operation)

        for op in self._cut.before[worker]:
            pair = (op // m % stages, op % m)
            if pair not in touched:
                final = op // m // stages == problem.kinds[-1]
                if final:
                    held.discard(pair)
                else:
                    held.add(pair)
        last_kind = problem.kinds[-1]
        for stage, i in sorted(held):
            operations = [kind * stages * m + stage * m + i for kind in problem.kinds]
            done = max(kind for kind in problem.kinds if operations[kind] in begun)
            if done == last_kind:
                continue
            constant += amounts.between(stage, i, done)
        for stage, i in sorted(touched):
            for start_point, end_point, demand in amounts.pieces(stage, i):
                if not demand:
                    continue
                begins, ends = moment(start_point), moment(end_point)
                if begins is None and start_point[0] not in begun:
                    continue  # the whole piece is after the window
                if ends is None and end_point[0] in begun:
                    continue
                begins = lowest if begins is None else begins
                ends = self._most if ends is None else ends
                length = model.new_int_var(0, self._most, "")
                intervals.append(model.new_interval_var(begins, length, ends, ""))
                demands.append(demand)
        limit = whole_limit - constant
        if sum(demands) > limit:
            model.add_cumulative(intervals, demands, limit)

    def solved(self, effort: SolverEffort) -> Improved:
        """The best plan that the solver finds."""
        self._model.add_hint(self._shift, 0)
        found = solve(self._model, effort)
        bound = self._plan.makespan - floor(found.bound / self._scale + 1e-6) if isfinite(found.bound) else 0.0
        if found.solver is None:
            return Improved(None, found.optimal, bound)
        value = {operation: found.solver.value(end) for operation, end in self._ends.items()}
        orders = [
            [*before, *sorted(own, key=lambda op: (value[op], value[op] - self._times.time[op], op)), *after]
            for before, own, after in zip(self._cut.before, self._cut.inside, self._cut.after, strict=True)
        ]
        return Improved(self._times.plan(orders), found.optimal, bound)
