"""A cut that fits: layers on stages within the limits of memory, with as much recomputation as that needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from pipework.planning.cuts import CutProblem, Effort, best_cuts, nearest_cut
from pipework.planning.search.candidate import Candidate, Choice, evaluate, kinds_of
from pipework.schedule import Costs, build, simulate

if TYPE_CHECKING:
    from pipework.planning.request import PlanRequest
    from pipework.planning.search.budget import SearchBudget
    from pipework.planning.search.choices import Shape

# Many cuts are made, and the best are improved by simulation: each may take some hundredths of a second.
_EFFORT = Effort(fair=40_000, exact=40_000, moves=1_500, width=16)
_VARIANTS = 8
_PARTS = 4  # recomputation grows by this part of a stage's micro-batches
_SIXTEENTHS = 16  # and shrinks by these
_ENOUGH = 0.4  # of the budget; then recomputation is left as it is


class Fitter:
    """Finds cuts for a request; keeps what it knows of schedules."""

    def __init__(self, request: PlanRequest, budget: SearchBudget) -> None:
        self._request, self._budget = request, budget
        self._in_flight: dict[tuple[str, tuple[int, ...], int], tuple[float, ...]] = {}

    def fitted(self, order: tuple[int, ...], shape: Shape, chunks: int, schedule: str) -> Candidate:
        """The best cut for a schedule with a name, as far as memory allows.

        Recomputation begins with none. As long as a worker's bytes are above its limit, its stages recompute more, and
        the layers are cut again: what is recomputed takes time, so such a worker gets fewer layers.

        Returns:
            A candidate that fits, or the last one that was tried.
        """
        stages = len(shape.placement)
        parts = [0] * stages
        while True:
            candidate = self._evaluated(self._cut(order, shape, chunks, schedule, parts))
            over = [worker for worker, held in enumerate(candidate.workers) if not held.fits]
            more = [s for s in range(stages) if shape.placement[s] in over and parts[s] < _PARTS]
            if not more:
                break
            for stage in more:
                parts[stage] += 1
        return self._fewer(candidate) if candidate.fits else candidate

    def _cut(self, order: tuple[int, ...], shape: Shape, chunks: int, schedule: str, parts: Sequence[int]) -> Choice:
        recomputed = tuple(-(-chunks * part // _PARTS) for part in parts)
        problem = self._problem(order, shape, chunks, schedule, recomputed)
        balance = nearest_cut(problem, _EFFORT).balance
        return Choice(order, shape.placement, chunks, balance, recomputed, schedule)

    def variants(self, candidate: Candidate, shape: Shape) -> list[Choice]:
        """The same choice with other good cuts."""
        choice = candidate.choice
        assert choice.schedule is not None
        problem = self._problem(choice.order, shape, choice.chunks, choice.schedule, choice.recomputed)
        try:
            cuts = best_cuts(problem, _VARIANTS)
        except ValueError:  # what fits according to the simulation need not fit for unit costs
            return []
        return [replace(choice, balance=cut.balance) for cut in cuts if cut.balance != choice.balance]

    def _problem(
        self, order: tuple[int, ...], shape: Shape, chunks: int, schedule: str, recomputed: tuple[int, ...]
    ) -> CutProblem:
        request, sums = self._request, self._request.sums(chunks)
        kinds = kinds_of(request, order, shape.placement)
        in_flight = self._peaks(schedule, shape, chunks)
        activations = sums.layer_activations()
        seconds, memory = {}, {}
        for kind, most, count in zip(kinds, in_flight, recomputed, strict=True):
            again = count / chunks
            if (kind, count) not in seconds:
                seconds[kind, count] = sums.layer_seconds(kind, again=again)
            if (most, count) not in memory:
                held = 1 + (most - 1) * (1 - again) if count else most
                memory[most, count] = [fixed + held * each for fixed, each in zip(sums.fixed, activations, strict=True)]
        limits = [request.limits[device] for device in order]
        return CutProblem(
            shape.placement,
            [seconds[key] for key in zip(kinds, recomputed, strict=True)],
            [memory[key] for key in zip(in_flight, recomputed, strict=True)],
            None if min(limits) == inf else limits,
        )

    def _peaks(self, schedule: str, shape: Shape, chunks: int) -> tuple[float, ...]:
        """The micro-batches that each stage holds at most, if all stages take equally long."""
        key = (schedule, shape.placement, chunks)
        if key not in self._in_flight:
            workers = 1 + max(shape.placement)
            made = build(schedule, workers=workers, chunks=chunks, stages_per_worker=shape.stages_per_worker)
            self._in_flight[key] = simulate(made, Costs()).stage_peak_memory
        return self._in_flight[key]

    def _fewer(self, candidate: Candidate) -> Candidate:
        """The same cut with as little recomputation as fits, found by halving.

        All stages recompute the same part of what they did first; then each one is tried by itself, as long as the
        budget allows it.
        """
        whole = candidate.choice.recomputed
        low, high = 0, _SIXTEENTHS
        while any(whole) and low < high:
            middle = (low + high) // 2
            fewer = self._with(candidate, tuple(-(-count * middle // _SIXTEENTHS) for count in whole))
            low, high = (low, middle) if fewer is not None else (middle + 1, high)
            candidate = fewer or candidate
        for stage, most in enumerate(candidate.choice.recomputed):
            low, high = 0, most
            while low < high and self._budget.share() < _ENOUGH:
                middle = (low + high) // 2
                recomputed = list(candidate.choice.recomputed)
                recomputed[stage] = middle
                fewer = self._with(candidate, tuple(recomputed))
                low, high = (low, middle) if fewer is not None else (middle + 1, high)
                candidate = fewer or candidate
        return candidate

    def _with(self, candidate: Candidate, recomputed: tuple[int, ...]) -> Candidate | None:
        """The candidate with other numbers of recomputed micro-batches, if it fits and is no slower."""
        other = self._evaluated(replace(candidate.choice, recomputed=recomputed))
        return other if other.fits and other.rank <= candidate.rank else None

    def _evaluated(self, choice: Choice) -> Candidate:
        return self._budget.spend(lambda: evaluate(self._request, choice))
