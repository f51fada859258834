"""The solver of OR-tools: whether it is there, how long it may search, and memory in integers for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from math import floor, inf, isinf
from typing import Any, NamedTuple

from pipework_synthesis.problem import FORWARD, GRADIENT, Problem, integer_scale


class SolverEffort(NamedTuple):
    """How long the solver may search.

    Attributes:
        amount: seconds, or the solver's own deterministic units.
        deterministic: whether the amount is in deterministic units, which make results the same on each machine.
        seed: of the solver's random choices.
    """

    amount: float
    deterministic: bool
    seed: int = 0


class SolverResult(NamedTuple):
    """What a solver found.

    Attributes:
        solver: which knows the values; None: no solution.
        optimal: whether the solution is proven to be the best.
        bound: of the objective.
    """

    solver: Any
    optimal: bool
    bound: float


def available() -> bool:
    """Whether OR-tools is installed."""
    return find_spec("ortools") is not None


def solve(model: Any, effort: SolverEffort, workers: int = 1) -> SolverResult:
    """Let the solver search."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    # Linear relaxations say little about orders: without them, windows took a fifth less time, and proofs a third.
    solver.parameters.linearization_level = 0
    solver.parameters.random_seed = effort.seed
    if effort.deterministic:
        solver.parameters.max_deterministic_time = effort.amount
    else:
        solver.parameters.max_time_in_seconds = effort.amount
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    # Without a solution, the solver reports 0 as bound.
    bound = solver.best_objective_bound if found else inf
    return SolverResult(solver if found else None, status == cp_model.OPTIMAL, bound)


Point = tuple[int, int]
"""An operation, and 0 for its start or 1 for its end."""


@dataclass(frozen=True)
class Amounts:
    """Memory in integers.

    Attributes:
        problem: whose memory it is.
        active, small, waiting: of a micro-batch on each stage.
        limits: of each worker; None: no limit.
        exact: whether the integers are the memory without rounding.
    """

    problem: Problem
    active: tuple[int, ...]
    small: tuple[int, ...]
    waiting: tuple[int, ...]
    limits: tuple[int | None, ...]
    exact: bool

    def pieces(self, stage: int, micro_batch: int) -> list[tuple[Point, Point, int]]:
        """From when to when a micro-batch holds how much on a stage."""
        problem = self.problem
        m = problem.micro_batches
        forward, gradient, weight = ((kind * problem.stages + stage) * m + micro_batch for kind in range(3))
        active, small, waiting = self.active[stage], self.small[stage], self.waiting[stage]
        begin = (forward, 0)
        if problem.again[stage][micro_batch]:
            pieces = [(begin, (forward, 1), max(active, small)), ((forward, 1), (gradient, 0), small)]
            begin = (gradient, 0)
        else:
            pieces = []
        if not problem.split:
            return [*pieces, (begin, (gradient, 1), active)]
        if waiting == active:
            return [*pieces, (begin, (weight, 1), active)]
        if waiting < active:
            return [*pieces, (begin, (gradient, 1), active), ((gradient, 1), (weight, 1), waiting)]
        if begin != (gradient, 0):
            pieces.append((begin, (gradient, 0), active))
        return [*pieces, ((gradient, 0), (weight, 1), waiting)]

    def between(self, stage: int, micro_batch: int, done: int) -> int:
        """What a micro-batch holds on a stage after an operation of the kind `done`."""
        if done == FORWARD:
            return self.small[stage] if self.problem.again[stage][micro_batch] else self.active[stage]
        return self.waiting[stage] if done == GRADIENT and self.problem.split else 0


def amounts_of(problem: Problem) -> Amounts:
    """The memory of a problem in integers; if it is not exact, results are to be checked against the problem."""
    numbers = [*problem.active, *problem.small, *problem.waiting]
    found, exact = integer_scale(numbers, 1000)
    scale = found if exact else 1e6 / max(numbers)

    def whole(values: Iterable[float]) -> tuple[int, ...]:
        return tuple(round(value * scale) for value in values)

    return Amounts(
        problem,
        whole(problem.active),
        whole(problem.small),
        whole(problem.waiting),
        # Rounding must not forbid a schedule that fills the memory.
        tuple(None if isinf(limit) else floor(limit * scale + (1e-6 if exact else 100)) for limit in problem.limits),
        exact,
    )
