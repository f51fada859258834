"""The search for a plan: cuts, micro-batches, schedules, recomputation and orders of devices within a budget.

1. Each schedule by name, with each number of micro-batches and each order of unequal devices, gets the best cut for it.
   Where that does not fit, stages recompute until it does.
2. The best of these get other good cuts, and then their boundaries are moved by a layer, as long as that helps.

What is best is the simulated step of a candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, permutations
from math import inf
from typing import TYPE_CHECKING

from pipework.planning.candidate import Candidate, Choice, evaluate
from pipework.planning.cuts import CutProblem, best_cuts
from pipework.schedule import SCHEDULES, Costs, build, simulate
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.draw.units import counted, time_text
from pipework.schedule.placement import loop_placement, wave_placement

if TYPE_CHECKING:
    from pipework.planning.request import PlanRequest

_ORDERS = 24  # of unequal devices, at most
_FEW = 8  # devices, of which a part may be enough
_MOST_STAGES = 4  # of a worker
_BEST = 4  # candidates of other sizes and shapes, whose cuts are improved
_VARIANTS = 8  # other cuts of each
_PARTS = 4  # recomputation grows by this part of a stage's micro-batches
# What is often the best with whole backwards or halves, with much memory or little.
_PROMISING = ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-1f1b")


@dataclass
class SearchBudget:
    """When to stop: after some seconds, or after a number of simulated candidates, which is the same in every run.

    Attributes:
        seconds: of the clock; infinity: no limit.
        iterations: candidates; infinity: no limit.
        used: candidates so far.
    """

    seconds: float = inf
    iterations: float = inf
    used: int = 0
    _start: float = field(default_factory=time.perf_counter)

    def evaluated(self, request: PlanRequest, choice: Choice) -> Candidate:
        """Simulate one candidate more."""
        self.used += 1
        return evaluate(request, choice)

    def share(self) -> float:
        """How much is used, from 0 to 1 and more."""
        return max((time.perf_counter() - self._start) / self.seconds, self.used / self.iterations)

    def part(self, share: float) -> SearchBudget:
        """A budget of a share of this one, which begins now."""
        return SearchBudget(share * self.seconds, max(1.0, share * self.iterations))


def checked_budget(seconds: float | None, iterations: int | None) -> SearchBudget:
    """The budget of a search; iterations count, if they are given.

    Raises:
        TypeError: the number of iterations is no integer.
        ValueError: a number is not above 0, or there is none.
    """
    if iterations is not None:
        positive_integers(iterations=iterations)
        return SearchBudget(iterations=iterations)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < inf:
        raise ValueError(
            f"seconds is {seconds!r}: wanted a number above 0 and not infinite, or iterations= in its place"
        )
    return SearchBudget(seconds)


def choices(request: PlanRequest) -> list[Choice]:
    """All choices of a schedule by name, without a cut: promising ones first, in case that there is no time for all.

    Each stage has a layer at least.
    """
    layers, wanted = len(request.profile.layers), 4 * len(request.devices)
    allowed = request.schedules or [name for name in SCHEDULES if name not in ("fill-drain", "forward-only")]
    found: list[tuple[tuple[object, ...], Choice]] = []
    for place, order in enumerate(orders(request)):
        for name in allowed:
            spec = SCHEDULES[name]
            for each in range(1, _MOST_STAGES + 1) if spec.any_stages_per_worker else (spec.stages_per_worker,):
                if each * len(order) > layers or (each % 2 and spec.placement is wave_placement):
                    continue
                if spec.any_stages_per_worker and each == 1 and spec.placement is loop_placement and len(order) > 1:
                    continue  # schedules of one stage are there by their own names
                placement = spec.placement(len(order), each)
                later = name not in _PROMISING or each > 2
                for count in request.chunks:
                    key = later, abs(count - wanted), count, place, len(placement), placement
                    found.append((key, Choice(order, placement, count, (), (0,) * len(placement), name)))
    return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]


def orders(request: PlanRequest) -> list[tuple[int, ...]]:
    """Orders of the devices, as indices: the given one first, then others; also without the slowest.

    Devices of one kind with one limit are alike. Of many unequal ones, those in order of speed and of memory are taken,
    and some more. Half of a few equal devices, or a quarter, may be enough: messages may cost more than they save.
    """
    kinds, limits = request.kinds, request.limits
    given = tuple(range(len(kinds)))
    if request.keeps_order:
        return [given]
    alike = list(zip(kinds, limits, strict=True))
    if len({*alike}) == 1:
        halves = [given]
        while len(halves[-1]) > 1 and len(given) <= _FEW:
            halves.append(given[: -(-len(halves[-1]) // 2)])
        return halves
    # With larger micro-batches another kind of device may be the fastest; those in the middle decide.
    sums = request.sums(request.chunks[len(request.chunks) // 2])
    speed = {kind: sum(sums.layer_seconds(kind)) for kind in {*kinds}}
    by_speed = sorted(given, key=lambda i: (speed[kinds[i]], -limits[i]))
    found: dict[tuple[tuple[str, float], ...], tuple[int, ...]] = {}
    for count in range(len(given), 0, -1):
        if count < len(given) and speed[kinds[by_speed[count]]] == speed[kinds[by_speed[0]]]:
            break  # all that are left are equally fast
        fastest = by_speed[:count]
        by_limit = sorted(fastest, key=lambda i: limits[i])
        more = {tuple(alike[i] for i in each): each for each in islice(permutations(sorted(fastest)), 5000)}
        for order in (sorted(fastest), fastest, fastest[::-1], by_limit, by_limit[::-1], *[*more.values()][:_ORDERS]):
            found.setdefault(tuple(alike[i] for i in order), tuple(order))
    return list(found.values())


class Search:
    """A search for the best candidate.

    Attributes:
        named: by name of a schedule, the best candidate that fits.
    """

    def __init__(self, request: PlanRequest, budget: SearchBudget, progress: Callable[[str], None]) -> None:
        self._request = request
        self._budget = budget
        self._progress = progress
        self._winner: Candidate | None = None
        self.named: dict[str, Candidate] = {}
        self._best: dict[tuple[tuple[int, ...], tuple[int, ...], int], Candidate] = {}
        self._in_flight: dict[tuple[str, tuple[int, ...], int], tuple[float, ...]] = {}

    def run(self) -> Candidate:
        """The best candidate within the budget; one that does not fit if none does."""
        for choice in choices(self._request):
            if self._winner is not None and self._budget.share() > (0.4 if self._winner.fits else 0.9):
                break
            self._take(self._fitted(choice))
        assert self._winner is not None
        for candidate in self._leaders()[:_BEST]:
            self._improve(candidate, 0.9)
        for candidate in self._leaders():  # if nothing fits yet, the rest of the budget is for finding what does
            if not self._winner.fits:
                self._improve(candidate, 1.0)
        return self._winner

    def _take(self, candidate: Candidate) -> None:
        """Remembers a candidate, and tells of it if it is the best of all."""
        choice = candidate.choice
        assert isinstance(choice.schedule, str)
        if candidate.fits:
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

    def _leaders(self) -> list[Candidate]:
        return sorted(self._best.values(), key=lambda each: each.rank)

    # A cut that fits

    def _fitted(self, choice: Choice) -> Candidate:
        """The best cut for a choice, as far as memory allows.

        Recomputation begins with none. As long as a worker's bytes are above its limit, its stages recompute more, and
        the layers are cut again: what is recomputed takes time, so such a worker gets fewer layers.

        Returns:
            A candidate that fits, or the last one that was tried.
        """
        while True:
            (balance,) = best_cuts(self._problem(choice))
            candidate = self._budget.evaluated(self._request, replace(choice, balance=balance))
            over = [not candidate.workers[worker].fits for worker in choice.placement]
            part = -(-choice.chunks // _PARTS)
            more = tuple(
                min(choice.chunks, count + part * too_much)
                for count, too_much in zip(choice.recomputed, over, strict=True)
            )
            if more == choice.recomputed:
                return self._with_less_recomputation(candidate) if candidate.fits else candidate
            choice = replace(choice, recomputed=more)

    def _problem(self, choice: Choice) -> CutProblem:
        """The layers to be cut: their seconds with recomputation, and their bytes with what is in flight."""
        request, sums, chunks = self._request, self._request.sums(choice.chunks), choice.chunks

        @cache  # stages that are alike share a row, which is added up once
        def seconds(kind: str, count: int) -> list[float]:
            return sums.layer_seconds(kind, again=count / chunks)

        @cache
        def memory(in_flight: float, count: int) -> list[float]:
            held = 1 + (in_flight - 1) * (1 - count / chunks) if count else in_flight
            return [fixed + held * each for fixed, each in zip(sums.fixed, sums.activations, strict=True)]

        return CutProblem(
            choice.placement,
            list(map(seconds, choice.kinds(request), choice.recomputed)),
            list(map(memory, self._peaks(choice), choice.recomputed)),
            [request.limits[device] for device in choice.order],
        )

    def _peaks(self, choice: Choice) -> tuple[float, ...]:
        """The micro-batches that each stage holds at most, if all stages take equally long."""
        assert isinstance(choice.schedule, str)
        key = choice.schedule, choice.placement, choice.chunks
        if key not in self._in_flight:
            each = len(choice.placement) // choice.workers
            made = build(choice.schedule, workers=choice.workers, chunks=choice.chunks, stages_per_worker=each)
            self._in_flight[key] = simulate(made, Costs()).stage_peak_memory
        return self._in_flight[key]

    def _with_less_recomputation(self, candidate: Candidate) -> Candidate:
        """The same cut with as little recomputation as fits: all stages with a part of it, then each by itself."""
        whole = candidate.choice.recomputed
        candidate = self._least(candidate, 16, lambda part: [-(-count * part // 16) for count in whole])
        for stage, most in enumerate(candidate.choice.recomputed):
            least = [*candidate.choice.recomputed]
            if self._budget.share() < 0.4:
                candidate = self._least(candidate, most, lambda n: [*least[:stage], n, *least[stage + 1 :]])  # noqa: B023
        return candidate

    def _least(self, candidate: Candidate, most: int, counts: Callable[[int], Sequence[int]]) -> Candidate:
        """Of the numbers up to the most, the smallest whose recomputation fits and is no slower, found by halving."""
        low, high = 0, most if any(counts(most)) else 0
        while low < high:
            middle = (low + high) // 2
            other = self._budget.evaluated(self._request, replace(candidate.choice, recomputed=tuple(counts(middle))))
            if other.fits and other.rank <= candidate.rank:
                candidate, high = other, middle
            else:
                low = middle + 1
        return candidate

    # Better cuts

    def _improve(self, candidate: Candidate, until: float) -> None:
        """Other good cuts; then one boundary after the other is moved by a layer, as long as that helps.

        Args:
            candidate: to be improved.
            until: the share of the budget at which to stop.
        """
        if self._budget.share() > until:
            return
        for variant in best_cuts(self._problem(candidate.choice), _VARIANTS):
            candidate = self._better(candidate, variant, until)
        before = None
        while candidate is not before:
            before = candidate
            for boundary in range(len(candidate.choice.balance) - 1):
                for by in (1, -1):
                    balance = [*candidate.choice.balance]
                    balance[boundary] += by
                    balance[boundary + 1] -= by
                    if min(balance) > 0:
                        candidate = self._better(candidate, tuple(balance), until)

    def _better(self, candidate: Candidate, balance: tuple[int, ...], until: float) -> Candidate:
        """The candidate, or that with another cut, if it is better and there is time to try it."""
        if self._budget.share() > until or balance == candidate.choice.balance:
            return candidate
        other = self._budget.evaluated(self._request, replace(candidate.choice, balance=balance))
        self._take(other)
        return min(candidate, other, key=lambda each: each.rank)
