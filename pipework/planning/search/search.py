"""The search for a plan: all cuts, sizes of micro-batches, schedules and orders of devices that a budget allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from pipework.planning.certificate import any_plan_bound
from pipework.planning.search.budget import SearchBudget
from pipework.planning.search.candidate import Candidate, Choice, evaluate, moved
from pipework.planning.search.choices import Shape, fewer, orders, shapes
from pipework.planning.search.fitting import Fitter
from pipework.schedule import ScheduleError, spread_evenly, synthesize, without_recompute
from pipework.schedule.draw.units import counted, time_text

if TYPE_CHECKING:
    from pipework.planning.request import PlanRequest

_BEST = 4  # candidates of other sizes and shapes, whose cuts are improved
_SYNTHESISED = 3  # of them, for which schedules are made
# A step of the synthesis is a window of the solver or some list schedules; what that is in simulated candidates, about.
_WINDOW, _LIST_SCHEDULES = 500, 20
# What is often the best with whole backwards or halves, with much memory or little.
_PROMISING = ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-1f1b")
_FEW_STAGES = 2
# Synthesis of so many operations leaves out schedules with a name, which the search has tried; it takes as long as some
# candidates before it makes a first schedule.
_LARGE, _FIRST_SCHEDULE = 500_000, 6


class Search:
    """A search in three parts: schedules with names for all sizes and shapes; better cuts; schedules made for them.

    Attributes:
        named: by name of a schedule, the best candidate that fits.
    """

    def __init__(self, request: PlanRequest, budget: SearchBudget, progress: Callable[[str], None]) -> None:
        self._request = request
        self._budget = budget
        self._progress = progress
        self._fitter = Fitter(request, budget)
        self._winner: Candidate | None = None
        self._shapes: dict[tuple[int, ...], Shape] = {}
        self._proven: dict[Choice, float] = {}
        self.named: dict[str, Candidate] = {}
        self._best: dict[tuple[tuple[int, ...], tuple[int, ...], int], Candidate] = {}

    def run(self) -> Candidate:
        """The best candidate within the budget; one that does not fit if none does."""
        for order, shape, chunks, name in self._coarse():
            used = self._budget.share()
            if self._winner is not None and used > (0.4 if self._winner.fits else 0.9):
                break
            self._take(self._fitter.fitted(order, shape, chunks, name))
        assert self._winner is not None
        for candidate in self._leaders()[:_BEST]:
            self._improve(candidate, 0.6)
        for candidate in self._leaders():  # if nothing fits yet, one that fits is worth more than a made schedule
            if not self._winner.fits:
                self._improve(candidate, 1.0)
        leaders = self._leaders()[:_SYNTHESISED]
        if self._request.schedules is None and not self._reached():
            for number, candidate in enumerate(leaders):
                self._synthesise(candidate, len(leaders) - number)
        return self._winner

    def proven(self, candidate: Candidate) -> float:
        """The seconds below which a solver has proven that no schedule of a candidate's stages can be; 0: none has."""
        return self._proven.get(candidate.choice, 0.0)

    def _reached(self) -> bool:
        """Whether the winner is as fast as any plan can be; measured seconds are no round numbers."""
        assert self._winner is not None
        return self._winner.fits and self._winner.seconds <= any_plan_bound(self._request) * (1 + 1e-9)

    def _coarse(self) -> Iterator[tuple[tuple[int, ...], Shape, int, str]]:
        """All choices that have a name; promising ones first, in case that there is no time for all."""
        request = self._request
        layers, wanted = len(request.profile.layers), 4 * len(request.devices)
        counts = sorted(request.chunks, key=lambda count: abs(count - wanted))
        for each in (orders(request), fewer(request)):
            choices = [
                (order, shape, name)
                for order in each
                for shape in shapes(len(order), layers, request.schedules)
                for name in shape.schedules
            ]
            self._shapes |= {shape.placement: shape for _, shape, _ in choices}
            for promising in (True, False):
                for chunks in counts:
                    for order, shape, name in choices:
                        if promising == (name in _PROMISING and shape.stages_per_worker <= _FEW_STAGES):
                            yield order, shape, chunks, name

    def _take(self, candidate: Candidate) -> None:
        """Remembers a candidate, and tells of it if it is the best of all."""
        choice = candidate.choice
        if choice.schedule is not None and candidate.fits:
            best = self.named.setdefault(choice.schedule, candidate)
            self.named[choice.schedule] = min(best, candidate, key=lambda each: each.rank)
        key = choice.order, choice.placement, choice.chunks
        if key not in self._best or candidate.rank < self._best[key].rank:
            self._best[key] = candidate
        if self._winner is not None and candidate.rank >= self._winner.rank:
            return
        self._winner = candidate
        text = time_text(candidate.seconds, "s") if candidate.fits else "too much memory"
        name = choice.schedule or "synthesised"
        size = f"{counted(choice.workers, 'worker')}, {counted(choice.chunks, 'micro-batch')}"
        self._progress(f"{text}: {name}, {size}, layers {list(choice.balance)}")

    def _evaluated(self, choice: Choice) -> Candidate:
        return self._budget.spend(lambda: evaluate(self._request, choice))

    def _leaders(self) -> list[Candidate]:
        return sorted(self._best.values(), key=lambda each: each.rank)

    def _improve(self, candidate: Candidate, until: float) -> None:
        """Other good cuts; then one boundary after the other is moved by a layer, as long as that helps.

        Args:
            candidate: to be improved.
            until: the share of the budget at which to stop.
        """
        if self._budget.share() > until:
            return
        for choice in self._fitter.variants(candidate, self._shapes[candidate.choice.placement]):
            if self._budget.share() > until:
                return
            other = self._evaluated(choice)
            self._take(other)
            candidate = min(candidate, other, key=lambda each: each.rank)
        better = True
        while better:
            better = False
            for boundary in range(len(candidate.choice.balance) - 1):
                for by in (1, -1):
                    if self._budget.share() > until:
                        return
                    near = moved(candidate.choice, boundary, by)
                    if near is None:
                        continue
                    other = self._evaluated(near)
                    self._take(other)
                    if other.rank < candidate.rank:
                        candidate, better = other, True

    def _synthesise(self, candidate: Candidate, left: int) -> None:
        """Makes schedules for the stages of a candidate, within what memory is left beside their weights.

        They recompute what the candidate does; if that is anything, then also half of it, and nothing: a schedule that
        is made for these stages may hold less than one with a name.
        """
        counts = [candidate.choice.recomputed]
        if any(counts[0]):
            counts += [tuple(count // 2 for count in counts[0]), (0,) * len(counts[0])]
        counts = list(dict.fromkeys(counts))
        for number, recomputed in enumerate(counts):
            share = (1 - self._budget.share()) / (left * len(counts) - number)
            if share > 0 and candidate.fits and self._budget.allows(_FIRST_SCHEDULE):
                self._synthesise_with(candidate, recomputed, share)

    def _synthesise_with(self, candidate: Candidate, recomputed: tuple[int, ...], share: float) -> None:
        limits = [each.limit - each.fixed - each.temporary for each in candidate.workers]
        choice = candidate.choice
        seed = replace(without_recompute(candidate.schedule), skips=())
        use_seconds = self._budget.seconds < inf
        steps = 0 if use_seconds else int(share * self._budget.iterations)
        windows = steps // _WINDOW
        try:
            made = synthesize(
                choice.placement,
                choice.chunks,
                candidate.costs,
                memory_limit=None if min(limits) == inf else limits,
                recomputed=[spread_evenly(count, choice.chunks) for count in recomputed],
                seconds=share * self._budget.seconds if use_seconds else None,
                iterations=None if use_seconds else max(1, windows or steps // _LIST_SCHEDULES),
                solver=None if use_seconds or windows else False,
                seeds=[seed],
                named=3 * len(choice.placement) * choice.chunks < _LARGE,
            )
        except ScheduleError:  # with less recomputation, or at the very edge of a limit
            self._budget.used += steps
            return
        self._budget.used += made.steps * (_WINDOW if windows else _LIST_SCHEDULES)
        own = replace(choice, recomputed=recomputed, schedule=None, orders=without_recompute(made.schedule))
        found = self._evaluated(own)
        self._proven[own] = made.lower_bound
        if recomputed == choice.recomputed:
            self._proven[choice] = made.lower_bound
        self._take(found)
