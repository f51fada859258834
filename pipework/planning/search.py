"""The search for a plan: cuts, micro-batches, schedules, recomputation and orders of devices within a budget.

1. Each schedule by name, with each number of micro-batches and each order of unequal devices, gets the best cut for it.
   Where that does not fit, stages recompute until it does, or activations go to host memory: the faster one counts.
2. In the best of these, layers are moved from stage to stage, as long as that helps.

What is best is the simulated step of a candidate. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from math import ceil, inf
from typing import TYPE_CHECKING, Any, NamedTuple

from pipework.planning.candidate import Candidate
from pipework.planning.cuts import CutProblem, best_cut
from pipework.planning.request import make_request, memory_size
from pipework.schedule import SCHEDULES, Costs, build, simulate, with_offload
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.draw.units import counted, memory_text, time_text
from pipework.schedule.placement import loop_placement, wave_placement

if TYPE_CHECKING:
    from pipework.planning.plan import Plan, WorkerBytes
    from pipework.planning.profiles import Profile
    from pipework.planning.request import PlanRequest

_FEW = 8  # equal devices, of which a part may be enough
_UNEQUAL = 4  # devices, all orders of which are tried
_MOST_STAGES = 4  # of a worker
_WITHIN = 1.15  # times the best plan's seconds; plans that are worth a trial
_BEST = 4  # candidates of other sizes and shapes, whose cuts are improved
_PARTS = 8  # recomputation grows by this part of a stage's micro-batches
# What is often the best with whole backwards or halves, with much memory or little.
_PROMISING = ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-1f1b")


class Budget(NamedTuple):
    """When a search stops.

    Attributes:
        seconds: of the clock; infinity: no limit.
        iterations: simulated candidates, the same in every run; infinity: no limit.
    """

    seconds: float = inf
    iterations: float = inf

    @classmethod
    def of(cls, seconds: float | None, iterations: int | None) -> Budget:
        """The budget that a user has given; iterations count, if they are given.

        Raises:
            TypeError: the number of iterations is no integer.
            ValueError: a number is not above 0, or there is none.
        """
        if iterations is not None:
            positive_integers(iterations=iterations)
            return cls(iterations=iterations)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < inf:
            raise ValueError(
                f"seconds is {seconds!r}: wanted a number above 0 and not infinite, or iterations= in its place"
            )
        return cls(seconds)


_SHORT = Budget(5.0, 24)  # to find what needs little memory


def plan_profile(
    profile: Profile,
    devices: Sequence[str],
    memory: float | str | Mapping[str, float | str] | None = None,
    *,
    seconds: float | None = 30.0,
    iterations: int | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Plan:
    """What :func:`pipework.plan` does with a profile, without importing torch.

    Args:
        profile: of the layers.
        devices: one for each worker: devices of the profile, or kinds of device.
        memory: the bytes that each device may hold.
        seconds: to search.
        iterations: candidates to try instead, which gives the same plan in every run.
        progress: called with a line for each better plan; None: lines are logged to "pipework" (INFO).
        options: batch, chunks, optimizer, schedules and offload, see `make_request`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or no plan fits: the message has the smallest limit that would do.
    """
    request, budget = make_request(profile, devices, memory, **options), Budget.of(seconds, iterations)
    return best_plans(request, budget, progress or logging.getLogger("pipework").info)[0]


def best_plans(request: PlanRequest, budget: Budget, report: Callable[[str], None], others: int = 0) -> list[Plan]:
    """The best plan, and after it the best of some other schedules with a name, if they are about as fast.

    Args:
        request: checked.
        budget: of the search.
        report: called with a line for each better plan.
        others: how many of them at most.

    Raises:
        ValueError: no plan fits.
    """
    layers, devices = request.profile.layers, len(request.devices)
    if not starts(request):
        raise ValueError(
            f"schedules {', '.join(map(repr, request.schedules or ()))} have several stages for each worker, which "
            f"{counted(len(layers), 'layer')} for {counted(devices, 'device')} do not allow: cut layers finer, give "
            "fewer devices, or let other schedules be chosen"
        )
    # What every plan holds: all weights, and each layer on some device.
    sums = request.sums(max(request.chunks))
    least = [fixed + size for fixed, size in zip(sums.fixed, sums.least_bytes(), strict=True)]
    lacking = max(1.0, max(least) / max(request.limits), sum(sums.fixed) / sum(request.limits))
    if lacking > 1:  # a short search with limits that are larger by this may find a plan, for the message
        budget, report = Budget(*map(min, budget, _SHORT)), lambda line: None
    search = Search(replace(request, limits=tuple(limit * lacking for limit in request.limits)), budget, report)
    found = search.run()
    if lacking > 1 or not found.fits:
        raise no_plan_fits(request, found.devices, found.workers)
    best: dict[str, Candidate] = {}  # of each schedule with a name
    for each in search.best():
        if each.fits and isinstance(each.schedule, str):
            best.setdefault(each.schedule, each)
    near = [each for each in best.values() if each is not found and each.seconds <= _WITHIN * found.seconds]
    seconds_of = {name: each.seconds for name, each in best.items()}
    notes = [
        f"memory is that of each device: {name} has {memory_text(limit * count, 'bytes')} for {count} workers"
        for name, limit in dict(zip(request.devices, request.limits, strict=True)).items()
        if limit < inf and (count := request.sharing[name]) > 1
    ]
    return [each.plan(seconds_of, notes=notes) for each in (found, *near[:others])]


def no_plan_fits(request: PlanRequest, devices: Sequence[str], workers: Sequence[WorkerBytes]) -> ValueError:
    """The error that says what the best plan lacks, and limits that can be given as `memory=` and would do.

    Args:
        request: what was asked for.
        devices: of the workers of the best plan.
        workers: what they hold.
    """
    host = sum(worker.host for worker in workers)
    if host > request.host_memory and all(worker.fits for worker in workers):
        return ValueError(
            f"no plan fits: in the best that was found, activations need {memory_text(host, 'bytes')} of host memory, "
            f"and {memory_text(request.host_memory, 'bytes')} are free; raise the limits of the devices, or make "
            "micro-batches smaller (more chunks)"
        )
    limits, sharing = dict(zip(request.devices, request.limits, strict=True)), request.sharing
    held = list(zip(devices, workers, strict=True))
    worst = max(range(len(held)), key=lambda worker: workers[worker].total / limits[devices[worker]])
    device, needs, limit = devices[worst], workers[worst].total, limits[devices[worst]]
    sizes = {
        name: max([limit, *(each.total for place, each in held if place == name)]) * sharing[name]
        for name, limit in limits.items()
        if limit < inf
    }
    wanted: Any = {name: memory_size(size) for name, size in sizes.items()}
    if len({limit * sharing[name] for name, limit in limits.items()}) == 1:  # one limit for all was given
        wanted = memory_size(max(sizes.values()))
    return ValueError(
        f"no plan fits: in the best that was found, worker {worst} ({device}) needs {memory_text(needs, 'bytes')} and "
        f"may hold {memory_text(limit, 'bytes')} ({needs / limit - 1:.2%} too much); it fits with memory={wanted!r}; "
        "raise the limits, search longer, use more devices, cut layers finer, or make micro-batches smaller (more "
        "chunks)"
    )


def starts(request: PlanRequest) -> list[Candidate]:
    """All schedules by name, without a cut: promising ones first, in case that there is no time for all.

    Each stage has a layer at least.
    """
    layers, wanted = len(request.profile.layers), 4 * len(request.devices)
    allowed = request.schedules or [name for name in SCHEDULES if name not in ("fill-drain", "forward-only")]
    found: list[tuple[tuple[object, ...], Candidate]] = []
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
                    start = Candidate(request, order, placement, count, name, recomputed=(0,) * len(placement))
                    found.append((key, start))
    return [start for _, start in sorted(found, key=lambda pair: pair[0])]


def orders(request: PlanRequest) -> list[tuple[int, ...]]:
    """Orders of the devices, as indices: the given one first, then others; also without the slowest.

    Devices of one kind with one limit are alike. Of many unequal ones, those in order of speed and of memory are taken.
    Half of a few equal devices, or a quarter, may be enough: messages may cost more than they save.
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
        more = permutations(sorted(fastest)) if count <= _UNEQUAL else ()
        for order in (sorted(fastest), fastest, fastest[::-1], by_limit, by_limit[::-1], *more):
            found.setdefault(tuple(alike[i] for i in order), tuple(order))
    return list(found.values())


class Search:
    """A search for the best candidate."""

    def __init__(self, request: PlanRequest, budget: Budget, report: Callable[[str], None]) -> None:
        self._request, self._budget, self._report = request, budget, report
        self._begin, self._used = time.perf_counter(), 0
        self._winner: Candidate | None = None
        self._best: dict[tuple[object, ...], Candidate] = {}  # by all that is chosen beside cut and recomputation
        self._in_flight: dict[tuple[object, ...], tuple[float, ...]] = {}

    def run(self) -> Candidate:
        """The best candidate within the budget; one that does not fit if none does."""
        todo = starts(self._request)
        # If nothing has fitted for long, it is the turn of the smallest micro-batches.
        for turn, until in ((todo, 0.4), (sorted(todo, key=lambda each: -each.chunks), 0.9)):
            for start in turn:
                if self._winner is not None and (self._share() > until or (until > 0.4 and self._winner.fits)):
                    break
                if _key(start) not in self._best:
                    for each in self._fitted(start):
                        self._take(each)
        shapes: dict[tuple[object, ...], Candidate] = {}  # the best of each, whatever its schedule
        for each in self.best():
            shapes.setdefault(_key(each)[1:], each)
        for number, each in enumerate(shapes.values()):
            assert self._winner is not None
            if number < _BEST or not self._winner.fits:  # if nothing fits yet, the rest is for finding what does
                self._improve(each, 0.9 if number < _BEST else 1.0)
        assert self._winner is not None
        return self._winner

    def best(self) -> list[Candidate]:
        """The best candidates of each schedule, order of devices, placement and number of micro-batches, best first."""
        return sorted(self._best.values(), key=lambda each: each.rank)

    def _share(self) -> float:
        """How much of the budget is used, from 0 to 1 and more."""
        return max((time.perf_counter() - self._begin) / self._budget.seconds, self._used / self._budget.iterations)

    def _tried(self, candidate: Candidate, **changes: Any) -> Candidate:
        """A candidate with changes, which counts as one more that is simulated."""
        self._used += 1
        return replace(candidate, **changes)

    def _take(self, candidate: Candidate) -> None:
        """Remembers a candidate, and tells of it if it is the best of all."""
        key = _key(candidate)
        if key not in self._best or candidate.rank < self._best[key].rank:
            self._best[key] = candidate
        if self._winner is not None and candidate.rank >= self._winner.rank:
            return
        self._winner = candidate
        text = time_text(candidate.seconds, "s") if candidate.fits else "too much memory"
        size = f"{counted(len(candidate.order), 'worker')}, {counted(candidate.chunks, 'micro-batch')}"
        self._report(f"{text}: {candidate.schedule}, {size}, layers {list(candidate.balance)}")

    # A cut that fits

    def _fitted(self, candidate: Candidate) -> Iterator[Candidate]:
        """The best cuts, as far as memory allows: with recomputation, and with activations in host memory.

        They fit, or are the last ones that were tried.
        """
        plain = self._cut(candidate)
        if not self._request.may_offload or min(self._request.limits) == inf or self._is_free(plain):
            yield self._recomputing(plain)
            return
        moving = self._cut(replace(candidate, keep=0))
        if (
            not moving.fits or moving.seconds > plain.seconds
        ):  # else copies are hidden, and nothing is recomputed faster
            found = self._recomputing(plain)
            yield found
            moving = moving if moving.fits or found.fits else self._recomputing(moving)
            fitting, all_stay = 0, ceil(max(self._peaks(candidate))) * moving.fits
            while all_stay - fitting > 1:  # copies take time: as many micro-batches stay as fit
                keep = (fitting + all_stay) // 2
                other = self._cut(replace(moving, keep=keep))
                fitting, all_stay = (keep, all_stay) if other.fits else (fitting, keep)
                moving = min(moving, other, key=lambda each: each.rank)
        yield moving

    def _is_free(self, candidate: Candidate) -> bool:
        """Whether no limit binds: the candidate fits, and would be cut like this without limits."""
        free = replace(self._problem(candidate), limits=[inf] * len(candidate.order))
        return candidate.fits and candidate.balance == best_cut(free)

    def _cut(self, candidate: Candidate) -> Candidate:
        return self._tried(candidate, balance=best_cut(self._problem(candidate)))

    def _recomputing(self, candidate: Candidate) -> Candidate:
        """As long as a worker's bytes are above its limit, its stages recompute more, and the layers are cut again.

        What is recomputed takes time, so such a worker gets fewer layers.
        """
        while True:
            over = [not candidate.workers[worker].fits for worker in candidate.placement]
            part = -(-candidate.chunks // _PARTS)
            more = tuple(
                min(candidate.chunks, count + part * too_much)
                for count, too_much in zip(candidate.recomputed, over, strict=True)
            )
            if more == candidate.recomputed:
                return candidate
            candidate = self._cut(replace(candidate, recomputed=more))

    def _problem(self, candidate: Candidate) -> CutProblem:
        """The layers to be cut: their seconds with recomputation, and their bytes with what is in flight."""
        sums, chunks = candidate.sums, candidate.chunks

        @cache  # stages that are alike share a row, which is added up once
        def seconds(kind: str, count: int) -> list[float]:
            return sums.layer_seconds(kind, again=count / chunks)

        @cache
        def memory(in_flight: float, count: int) -> list[float]:
            held = 1 + (in_flight - 1) * (1 - count / chunks) if count else in_flight
            return [fixed + held * each for fixed, each in zip(sums.fixed, sums.activations, strict=True)]

        return CutProblem(
            candidate.placement,
            list(map(seconds, candidate.kinds, candidate.recomputed)),
            list(map(memory, self._peaks(candidate), candidate.recomputed)),
            [candidate.request.limits[device] for device in candidate.order],
        )

    def _peaks(self, candidate: Candidate) -> tuple[float, ...]:
        """The micro-batches that each stage holds at most, if all stages take equally long."""
        key = candidate.schedule, candidate.placement, candidate.chunks, candidate.keep
        if key not in self._in_flight:
            assert isinstance(candidate.schedule, str)
            workers = len(candidate.order)
            each = len(candidate.placement) // workers
            made = build(candidate.schedule, workers=workers, chunks=candidate.chunks, stages_per_worker=each)
            made = made if candidate.keep is None else with_offload(made, keep=candidate.keep)
            self._in_flight[key] = simulate(made, Costs()).stage_peak_memory
        return self._in_flight[key]

    # Better cuts

    def _improve(self, candidate: Candidate, until: float) -> None:
        """A layer is moved from one stage to another one, as long as that helps.

        Args:
            candidate: to be improved.
            until: the share of the budget at which to stop.
        """
        before, stages = None, range(len(candidate.balance))
        while candidate is not before:
            before = candidate
            # Neighbours first, then stages with others between, which each pass a layer on.
            ends = ((first, distance) for distance in stages[1:] for first in stages[:-distance])
            for first, distance in ends:
                for giver, taker in ((first, first + distance), (first + distance, first)):
                    if self._share() > until:
                        return
                    balance = [*candidate.balance]
                    balance[giver] -= 1
                    balance[taker] += 1
                    if balance[giver] > 0:
                        other = self._tried(candidate, balance=tuple(balance))
                        self._take(other)
                        candidate = min(candidate, other, key=lambda each: each.rank)


def _key(candidate: Candidate) -> tuple[object, ...]:
    return candidate.schedule, candidate.order, candidate.placement, candidate.chunks, candidate.keep
