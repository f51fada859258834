"""A steady state: the pattern of one micro-batch that repeats with the smallest period, found by a solver.

All operations of one micro-batch get a time; those of the next micro-batch have the same times, one period later. On
each worker the operations do not overlap modulo the period, and at no moment of it are too many micro-batches held.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipework_synthesis.problem import GRADIENT, Problem
from pipework_synthesis.solving import Amounts, Point, SolverEffort, solve


class Pattern(NamedTuple):
    """A pattern that repeats.

    Attributes:
        offsets: the start of each lane's first operation.
        period: the time from a micro-batch to the next one.
        optimal: whether the solver has proven that no pattern is better for the objective that it was given.
    """

    offsets: list[float]
    period: float
    optimal: bool


class Wanted(NamedTuple):
    """What a pattern should have.

    Attributes:
        period: its period; integer.
        held: the weight of the time for which memory is held, besides that of the time from the first to the last
            gradient operation.
    """

    period: int
    held: int


def pattern(problem: Problem, amounts: Amounts, wanted: Wanted, effort: SolverEffort) -> Pattern | None:
    """Find a pattern with a given period.

    Args:
        problem: with times in integers. Stages that recompute most micro-batches do so in the pattern.
        amounts: its memory.
        wanted: the period, and what is made small.
        effort: how long the solver may search.

    Returns:
        None if there is no pattern, or none was found.
    """
    return _Pattern(problem, amounts, wanted).solved(effort)


class _Pattern:
    def __init__(self, problem: Problem, amounts: Amounts, wanted: Wanted) -> None:
        from ortools.sat.python import cp_model

        self._problem, self._amounts, self._period = problem, amounts, wanted.period
        self._model = cp_model.CpModel()
        stages = problem.stages
        self._lead = [
            round(lead) if 2 * sum(again) >= problem.micro_batches else 0
            for lead, again in zip(problem.leads, problem.again, strict=True)
        ]
        self._lanes = len(problem.kinds) * stages
        horizon = wanted.period * (2 * problem.workers + 4) * 2
        self._start = [self._model.new_int_var(0, horizon, "") for _ in range(self._lanes)]
        self._phases: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._horizon = horizon
        self._precede()
        self._share_workers()
        self._limit_memory()
        last = self._start[stages]
        held = sum(self._end(stages * problem.kinds[-1] + s) - self._start[s] for s in range(stages))
        self._model.minimize(4 * stages * last + wanted.held * held)

    def _time(self, lane: int) -> int:
        kind, stage = divmod(lane, self._problem.stages)
        return round(self._problem.times[kind][stage]) + (self._lead[stage] if kind == GRADIENT else 0)

    def _end(self, lane: int) -> Any:
        return self._start[lane] + self._time(lane)

    def _precede(self) -> None:
        problem, start, model = self._problem, self._start, self._model
        stages = problem.stages
        model.add(start[0] == 0)
        for stage in range(stages - 1):
            hop = round(problem.hops[stage])
            model.add(start[stage + 1] >= self._end(stage) + hop)
            model.add(start[stages + stage] + self._lead[stage] >= self._end(stages + stage + 1) + hop)
        for stage in range(stages):
            model.add(start[stages + stage] >= self._end(stage))
            if problem.split:
                model.add(start[2 * stages + stage] >= self._end(stages + stage))

    def _phase(self, lane: int, which: int) -> tuple[Any, Any]:
        """The start or end of a lane's operation as whole periods and the rest."""
        if (lane, which) not in self._phases:
            model, period = self._model, self._period
            moment = self._moment((lane, which))
            rounds = model.new_int_var(0, self._horizon // period + 1, "")
            rest = model.new_int_var(0, period - 1, "")
            model.add(moment == period * rounds + rest)
            self._phases[lane, which] = rounds, rest
        return self._phases[lane, which]

    def _moment(self, event: tuple[int, int]) -> Any:
        lane, which = event
        return self._start[lane] if which == 0 else self._end(lane)

    def _share_workers(self) -> None:
        problem, model, period = self._problem, self._model, self._period
        for own in problem.own():
            intervals = []
            for kind in problem.kinds:
                for stage in own:
                    lane = kind * problem.stages + stage
                    _, rest = self._phase(lane, 0)
                    time = self._time(lane)
                    if time:
                        intervals += [
                            model.new_interval_var(rest + turn, time, rest + turn + time, "") for turn in (0, period)
                        ]
            model.add_no_overlap(intervals)

    def _limit_memory(self) -> None:
        """At each moment when a piece of memory begins to be held, all pieces fit."""
        problem, model, amounts = self._problem, self._model, self._amounts
        for worker, own in enumerate(problem.own()):
            limit = amounts.limits[worker]
            if limit is None:
                continue
            pieces = []
            for stage in own:
                # A micro-batch that the pattern recomputes, or not; if there is none, the lead is 0 and all are alike.
                example = max(0, problem.again[stage].find(bool(self._lead[stage])))
                for first, final, amount in amounts.pieces(stage, example):
                    if amount:
                        pieces.append((self._of(first), self._of(final), amount))
            # Implied, but the solver sees it at once: memory x time within a period.
            area = [amount * (self._moment(end) - self._moment(begin)) for begin, end, amount in pieces]
            model.add(sum(area) <= limit * self._period)
            for moment in {begin for begin, _, _ in pieces}:
                total: Any = 0
                for begin, end, amount in pieces:
                    first_rounds, _ = self._phase(*begin)
                    last_rounds, _ = self._phase(*end)
                    total += amount * (
                        last_rounds - first_rounds + self._up_to(begin, moment) - self._up_to(end, moment)
                    )
                model.add(total <= limit)

    def _of(self, point: Point) -> tuple[int, int]:
        operation, which = point
        return operation // self._problem.micro_batches, which

    def _up_to(self, event: tuple[int, int], moment: tuple[int, int]) -> Any:
        """Whether the phase of an event is at most that of a moment."""
        if event == moment:
            return 1
        model = self._model
        _, one = self._phase(*event)
        _, other = self._phase(*moment)
        literal = model.new_bool_var("")
        model.add(one <= other).only_enforce_if(literal)
        model.add(one > other).only_enforce_if(~literal)
        return literal

    def solved(self, effort: SolverEffort) -> Pattern | None:
        found = solve(self._model, effort)
        if found.solver is None:
            return None
        offsets = [float(found.solver.value(start)) for start in self._start]
        if not self._problem.split:
            offsets += [0.0] * self._problem.stages
        return Pattern(offsets, float(self._period), found.optimal)
