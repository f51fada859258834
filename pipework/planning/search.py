"""The search for a plan: cuts, micro-batches, schedules, recomputation and orders of devices within a budget.

1. Each schedule by name, with each number of micro-batches and each order of unequal devices, gets the best cut for it.
   Where that does not fit, stages recompute until it does, or activations go to host memory: the faster one counts.
2. In the best of these, workers get more stages, as long as that helps.
3. Then layers are moved from stage to stage, as long as that helps.

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
from pipework.planning.cuts import CutProblem, best_cut, even_cut
from pipework.planning.request import make_request, memory_size
from pipework.schedule import SCHEDULES, Costs, simulate, with_offload
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.draw.units import counted, memory_text, time_text
from pipework.schedule.placement import loop_placement, wave_placement

if TYPE_CHECKING:
    from pipework.planning.plan import Plan, WorkerBytes
    from pipework.planning.profiles import Profile
    from pipework.planning.request import PlanRequest

_FEW = 8  # equal devices, of which a part may be enough
_UNEQUAL = 4  # devices, all orders of which are tried
_FEW_STAGES = 4  # of a worker, which all candidates have; the best ones get more
_FAILURES = 2  # numbers of stages in turn that do not help: with some, layers are cut less evenly than with others
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
    if request.offload and not request.may_offload:
        notes.append(
            "offload=True changes nothing: no speed of the link to host memory is known; it is measured on "
            "accelerators, and rates=Rates(..., host_bytes_per_second=...) of pipework.planning.profile gives it"
        )
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
    shared = f", its part of {device}, which {sharing[device]} workers share" if sharing[device] > 1 else ""
    may_leave = request.optimizer and device != "cpu"  # whose memory is the host's
    away = "keep the optimizer's numbers on the host (HostOptimizer, optimizer=0), " if may_leave else ""
    return ValueError(
        f"no plan fits: in the best that was found, worker {worst} ({device}) needs {memory_text(needs, 'bytes')} and "
        f"may hold {memory_text(limit, 'bytes')}{shared} ({needs / limit - 1:.2%} too much); it fits with "
        f"memory={wanted!r}; raise the limits, {away}search longer, use more devices, cut layers finer, or make "
        "micro-batches smaller (more chunks)"
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
            for each in stage_counts(name, len(order), layers):
                if SCHEDULES[name].any_stages_per_worker and each > _FEW_STAGES:
                    break
                later = name not in _PROMISING or each > 2
                for count in request.chunks:
                    start = started(request, order, name, each, count)
                    key = later, abs(count - wanted), count, place, len(start.placement), start.placement
                    found.append((key, start))
    return [start for _, start in sorted(found, key=lambda pair: pair[0])]


def stage_counts(name: str, workers: int, layers: int) -> list[int]:
    """The numbers of stages of a worker that are tried, in ascending order: each stage has a layer at least.

    Example:
        >>> stage_counts("interleaved-1f1b", 2, 34), stage_counts("hanayo", 2, 34), stage_counts("zb-v", 2, 3)
        ([2, 3, 4, 6, 8, 12, 16], [2, 4, 6, 8, 12, 16], [])
    """
    spec, counts = SCHEDULES[name], [1]
    while counts[-1] * workers <= layers:
        counts.append(counts[-1] + max(1, (1 << counts[-1].bit_length()) // 4))
    counts = counts[:-1] if spec.any_stages_per_worker else [spec.stages_per_worker]
    if spec.any_stages_per_worker and spec.placement is loop_placement and workers > 1:
        counts = counts[1:]  # schedules of one stage are there by their own names
    waves = spec.placement is wave_placement
    return [each for each in counts if each * workers <= layers and not (waves and each % 2)]


def started(request: PlanRequest, order: tuple[int, ...], name: str, stages: int, chunks: int) -> Candidate:
    """A schedule by name without a cut, with so many stages for each worker."""
    placement = SCHEDULES[name].placement(len(order), stages)
    return Candidate(request, order, placement, chunks, name, recomputed=(0,) * len(placement))


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


class InFlight(NamedTuple):
    """The micro-batches that a schedule has in flight.

    Attributes:
        most: of a stage.
        at_once: of each stage, about as many as there are when its worker holds the most: its stages take turns.
    """

    most: float
    at_once: tuple[float, ...]


class Search:
    """A search for the best candidate."""

    def __init__(self, request: PlanRequest, budget: Budget, report: Callable[[str], None]) -> None:
        self._request, self._budget, self._report = request, budget, report
        self._begin, self._used = time.perf_counter(), 0
        self._winner: Candidate | None = None
        self._best: dict[tuple[object, ...], Candidate] = {}  # by all that is chosen beside cut and recomputation
        self._held: dict[tuple[object, ...], InFlight] = {}

    def run(self) -> Candidate:
        """The best candidate within the budget; one that does not fit if none does."""
        todo = starts(self._request)
        # If nothing has fitted for long, it is the turn of the smallest micro-batches.
        for turn, until, grown in ((todo, 0.4, 0.6), (sorted(todo, key=lambda each: -each.chunks), 0.8, 0.9)):
            if turn is not todo and self._winner is not None and self._winner.fits:
                break
            for start in turn:
                if self._winner is not None and (self._share() > until or (until > 0.4 and self._winner.fits)):
                    break
                if _key(start) not in self._best and not self._holds_too_much(start):
                    for each in self._fitted(start):
                        self._take(each)
            self._grow(grown)
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

    def _holds_too_much(self, start: Candidate) -> bool:
        """Whether it has not fitted with more micro-batches, which are smaller."""
        shape = start.schedule, start.order, start.placement
        alike = [each for each in self._best.values() if (each.schedule, each.order, each.placement) == shape]
        return (
            max({each.chunks for each in alike} - {each.chunks for each in alike if each.fits}, default=0)
            > start.chunks
        )

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
        least = inf
        if self._request.may_offload:
            free = self._cut(candidate, limited=False)
            if free.fits:
                yield free
                return
            moving = self._moving(candidate, free.seconds)
            yield moving
            if moving.fits and moving.seconds <= free.seconds:  # copies are hidden
                return
            least = moving.seconds if moving.fits else inf
        yield self._recomputing(self._cut(candidate), least)

    def _moving(self, candidate: Candidate, free: float) -> Candidate:
        """With activations in host memory: as few as must go, if copies cost time: a step takes more than `free`."""
        moving = self._cut(replace(candidate, keep=0))
        if not moving.fits:
            return self._recomputing(moving)
        fitting, all_stay = 0, ceil(self._in_flight(candidate).most)
        while moving.seconds > free and all_stay - fitting > 1:
            keep = (fitting + all_stay) // 2
            other = self._cut(replace(candidate, keep=keep))
            fitting, all_stay = (keep, all_stay) if other.fits else (fitting, keep)
            moving = min(moving, other, key=lambda each: each.rank)
        return moving

    def _cut(self, candidate: Candidate, *, limited: bool = True) -> Candidate:
        """With the better one of two cuts: workers have equal work within the limits, or stages have."""
        problem = self._problem(candidate)
        if not limited:
            problem = replace(problem, limits=[inf] * len(candidate.order))
        cuts = [best_cut(problem)]
        assert isinstance(candidate.schedule, str)
        spec = SCHEDULES[candidate.schedule]
        if spec.any_stages_per_worker and not spec.timed and candidate.stages_per_worker > 1:
            cuts.append(even_cut(problem))  # in a fixed order, workers wait for each other's stages
        return min((self._tried(candidate, balance=each) for each in dict.fromkeys(cuts)), key=lambda each: each.rank)

    def _recomputing(self, candidate: Candidate, least: float = inf) -> Candidate:
        """As long as a worker's bytes are above its limit, its stages recompute more, and the layers are cut again.

        What is recomputed takes time, so such a worker gets fewer layers. If nothing fits, all is recomputed;
        if the step takes more seconds than `least`, it is of no use.
        """
        if candidate.fits or candidate.seconds >= least:
            return candidate
        chunks, part = candidate.chunks, -(-candidate.chunks // _PARTS)
        all_again = self._cut(replace(candidate, recomputed=(chunks,) * len(candidate.placement)))
        if not all_again.fits:
            return all_again
        # Bytes fall about evenly with what is recomputed, so the first parts are not tried one by one.
        shares = [
            0.0 if most.fits else (most.total - most.limit) / (most.total - few.total)
            for most, few in zip(candidate.workers, all_again.workers, strict=True)
        ]
        counts = [part * max(0, int(shares[worker] * chunks / part) - 1) for worker in candidate.placement]
        while not candidate.fits and candidate.seconds < least:
            host = candidate.host_bytes > self._request.host_memory
            over = [host or not candidate.workers[worker].fits for worker in candidate.placement]
            before = counts
            counts = [min(chunks, count + part * too_much) for count, too_much in zip(counts, over, strict=True)]
            if counts == before:
                return all_again
            candidate = self._cut(replace(candidate, recomputed=tuple(counts)))
        return min(candidate, all_again, key=lambda each: each.rank)

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
            list(map(memory, self._in_flight(candidate).at_once, candidate.recomputed)),
            [candidate.request.limits[device] for device in candidate.order],
        )

    def _in_flight(self, candidate: Candidate) -> InFlight:
        """The micro-batches of each stage, if all stages take equally long and hold equally much."""
        key = candidate.schedule, candidate.placement, candidate.chunks, candidate.keep
        if key not in self._held:
            made = candidate.by_name()
            made = made if candidate.keep is None else with_offload(made, keep=candidate.keep)
            found = simulate(made, Costs())
            most, whole = found.stage_peak_memory, [0.0] * made.workers
            for peak, worker in zip(most, candidate.placement, strict=True):
                whole[worker] += peak
            shares = [peak / total for peak, total in zip(found.peak_memory, whole, strict=True)]
            at_once = [peak * shares[worker] for peak, worker in zip(most, candidate.placement, strict=True)]
            self._held[key] = InFlight(max(most), tuple(at_once))
        return self._held[key]

    # Better stages

    def _grow(self, until: float) -> None:
        """The best candidates get more stages for each worker, as long as that helps: less waits, and less is held.

        Args:
            until: the share of the budget at which to stop.
        """
        best: dict[object, Candidate] = {}  # of each schedule
        other: dict[object, Candidate] = {}  # of each number of micro-batches: what does not fit may with more stages
        for each in self.best():
            best.setdefault(each.schedule, each)
            other.setdefault((each.schedule, each.chunks), each)
        others = [each for each in other.values() if each is not best[each.schedule]]
        for start in (*list(best.values())[:_BEST], *others[:_BEST]):
            name = str(start.schedule)
            if not SCHEDULES[name].any_stages_per_worker:
                continue
            # With activations in host memory, and without: the slower one may be the faster one with more stages.
            alike = (each for each in self.best() if _sizes(each) == _sizes(start))
            family = {each.keep is None: each for each in sorted(alike, key=lambda each: each.rank, reverse=True)}
            failures, most = 0, max(each.stages_per_worker for each in family.values())
            for count in stage_counts(name, len(start.order), len(self._request.profile.layers)):
                if failures == _FAILURES or self._share() > until:
                    break
                if count > most:
                    failures += 1
                    for each in self._fitted(started(self._request, start.order, name, count, start.chunks)):
                        self._take(each)
                        before = family.setdefault(each.keep is None, each)
                        if before is each or each.rank < before.rank:
                            family[each.keep is None], failures = each, 0

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


def _sizes(candidate: Candidate) -> tuple[object, ...]:
    return candidate.schedule, candidate.order, candidate.chunks
