"""The search for a plan: all cuts, sizes of micro-batches, schedules and orders of devices that a budget allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipework.planning.search.budget import SearchBudget
from pipework.planning.search.candidate import Candidate, Choice, evaluate, moved
from pipework.planning.search.choices import Shape, fewer, orders, shapes
from pipework.planning.search.fitting import Fitter
from pipework.schedule.draw.units import counted, time_text

if TYPE_CHECKING:
    from pipework.planning.request import PlanRequest

_BEST = 4  # candidates of other sizes and shapes, whose cuts are improved
# What is often the best with whole backwards or halves, with much memory or little.
_PROMISING = ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-1f1b")
_FEW_STAGES = 2


class Search:
    """A search in two parts: schedules for all sizes and shapes, then better cuts for the best of them.

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
            self._improve(candidate, 0.9)
        for candidate in self._leaders():  # if nothing fits yet, the rest of the budget is for finding what does
            if not self._winner.fits:
                self._improve(candidate, 1.0)
        return self._winner

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
        size = f"{counted(choice.workers, 'worker')}, {counted(choice.chunks, 'micro-batch')}"
        self._progress(f"{text}: {choice.schedule}, {size}, layers {list(choice.balance)}")

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
