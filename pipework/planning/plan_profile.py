"""Plans from a profile alone, without the model and its devices; and what is said where memory does not suffice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from pipework.planning.candidate import Candidate, plan_of
from pipework.planning.request import make_request, memory_size
from pipework.planning.search import Search, SearchBudget, checked_budget, choices
from pipework.schedule.draw.units import counted, memory_text

if TYPE_CHECKING:
    from pipework.planning.plan import Plan, WorkerBytes
    from pipework.planning.profiles import Profile
    from pipework.planning.request import PlanRequest

_CANDIDATES, _SECONDS = 24, 5.0  # to find what needs little memory


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
        options: batch, chunks, optimizer and schedules, see `make_request`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or no plan fits: the message has the smallest limit that would do.
    """
    request, budget = make_request(profile, devices, memory, **options), checked_budget(seconds, iterations)
    return best_plans(request, budget, progress or logging.getLogger("pipework").info)[0]


def best_plans(
    request: PlanRequest,
    budget: SearchBudget,
    report: Callable[[str], None],
    *,
    named: int = 0,
    within: float = inf,
) -> list[Plan]:
    """The best plan, and after it the best of other schedules with a name.

    Args:
        request: checked.
        budget: of the search.
        report: called with a line for each better plan.
        named: how many others at most.
        within: they take at most so many times the best plan's seconds.

    Raises:
        ValueError: no plan fits.
    """
    layers, devices = request.profile.layers, len(request.devices)
    if not choices(request):
        raise ValueError(
            f"schedules {', '.join(map(repr, request.schedules or ()))} have several stages for each worker, which "
            f"{counted(len(layers), 'layer')} for {counted(devices, 'device')} do not allow: cut layers finer, give "
            "fewer devices, or let other schedules be chosen"
        )
    # What every plan holds: all weights, and each layer on some device.
    sums = request.sums(max(request.chunks))
    least = [fixed + size for fixed, size in zip(sums.fixed, sums.least_bytes(), strict=True)]
    lacking = max(max(least) / max(request.limits), sum(sums.fixed) / sum(request.limits))
    if lacking > 1:  # with limits that are larger by this, a short search may find a plan, for the message
        larger = replace(request, limits=tuple(limit * lacking for limit in request.limits))
        found = _search_for_memory(larger, budget)[1]
        raise no_plan_fits(request, found.devices, found.workers)
    search = Search(request, budget, report)
    found = search.run()
    if not found.fits and len(request.chunks) > 1:  # the time may have been too short for the smallest micro-batches
        search, found = min((search, found), _search_for_memory(request, budget), key=lambda pair: pair[1].rank)
    if not found.fits:
        raise no_plan_fits(request, found.devices, found.workers)
    others = sorted(search.named.values(), key=lambda each: each.rank)
    others = [each for each in others if each is not found and each.seconds <= within * found.seconds]
    seconds_of = {name: each.seconds for name, each in search.named.items()}
    return [plan_of(each, seconds_of) for each in (found, *others[:named])]


def _search_for_memory(request: PlanRequest, budget: SearchBudget) -> tuple[Search, Candidate]:
    """A short search for what needs little memory, with the smallest micro-batches."""
    seconds = budget.seconds if budget.iterations < inf else min(_SECONDS, budget.seconds)
    short = SearchBudget(seconds, min(_CANDIDATES, budget.iterations))
    search = Search(replace(request, chunks=(max(request.chunks),)), short, lambda line: None)
    return search, search.run()


def no_plan_fits(request: PlanRequest, devices: Sequence[str], workers: Sequence[WorkerBytes]) -> ValueError:
    """The error that says what the best plan lacks, and limits that can be given as `memory=` and would do.

    Args:
        request: what was asked for.
        devices: of the workers of the best plan.
        workers: what they hold.
    """
    limits = dict(zip(request.devices, request.limits, strict=True))
    shares = [held.total / limits[device] for held, device in zip(workers, devices, strict=True)]
    worst = shares.index(max(shares))
    needed = {name: limit * request.sharing[name] for name, limit in limits.items() if limit < inf}
    alike = len(needed) == len(limits) and len({*needed.values()}) == 1
    for name, held in zip(devices, workers, strict=True):
        if name in needed:
            needed[name] = max(needed[name], held.total * request.sharing[name])
    sizes = {name: memory_size(size) for name, size in needed.items()}
    wanted = f"a limit of {memory_size(max(needed.values()))}" if alike else f"the limits {sizes}"
    shared = ", which workers of one device share evenly" if max(request.sharing.values()) > 1 else ""
    return ValueError(
        f"no plan fits: in the best that was found, worker {worst} ({devices[worst]}) needs "
        f"{memory_text(workers[worst].total, 'bytes')} and may hold {memory_text(limits[devices[worst]], 'bytes')} "
        f"({shares[worst] - 1:.2%} too much); it fits with {wanted}{shared}; raise the limits, search longer, use more "
        "devices, cut layers finer, or make micro-batches smaller (more chunks)"
    )
