"""Plans from a profile alone, without the model and its devices; and what is said where memory does not suffice."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from pipework.planning.candidate import Candidate, plan_of
from pipework.planning.certificate import any_plan_bound
from pipework.planning.request import make_request, memory_size
from pipework.planning.search import Search, SearchBudget, checked_budget, shapes
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
    batch: int | None = None,
    chunks: int | Sequence[int] | None = None,
    optimizer: float = 2.0,
    schedules: Sequence[str] | None = None,
    seconds: float | None = 30.0,
    iterations: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Search for the fastest step that fits.

    Cuts, numbers of micro-batches, placements, recomputation of each stage and orders of unequal devices are tried with
    all schedules that have a name. What is best is the simulated step with the profile's times.

    Args:
        profile: of the layers.
        devices: one for each worker: devices of the profile, or kinds of device.
        memory: the bytes that each device may hold, such as "24GiB", for all or by device or kind. None: what the
            profile says that they have.
        batch: rows of a mini-batch; None: the profile's.
        chunks: the number of micro-batches, or several to choose from; None: the planner's choice.
        optimizer: how many numbers it keeps for each trained parameter: 2 for Adam, 0 for plain SGD.
        schedules: names that may be chosen; None: all.
        seconds: to search.
        iterations: candidates to try instead, which gives the same plan in every run.
        progress: called with a line for each better plan; None: lines are logged to "pipework" (INFO).

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or no plan fits: the message has the smallest limit that would do.
    """
    request = make_request(
        profile, devices, memory, batch=batch, chunks=chunks, optimizer=optimizer, schedules=schedules
    )
    budget = checked_budget(seconds, iterations)
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
    _refuse_impossible(request, budget)
    search = Search(request, budget, report)
    found = search.run()
    if not found.fits and len(request.chunks) > 1:  # the time may have been too short for the smallest micro-batches
        search, found = min((search, found), _search_for_memory(request, budget), key=lambda pair: pair[1].rank)
    if not found.fits:
        worst = found.shares.index(max(found.shares))
        held, devices = found.workers[worst], _devices_of(found)
        raise ValueError(
            f"no plan fits: the best that was found needs {memory_text(held.total, 'bytes')} on worker {worst} "
            f"({devices[worst]}), which may hold {memory_text(held.limit, 'bytes')} ({found.shares[worst] - 1:.2%} too "
            f"much), and fits with {limits_that_fit(request, devices, found.workers)}; raise the limits, search "
            "longer, use more devices, or make micro-batches smaller (more chunks)"
        )
    others = sorted(search.named.values(), key=lambda each: each.rank)
    others = [each for each in others if each is not found and each.seconds <= within * found.seconds]
    bound = any_plan_bound(request)
    seconds_of = {name: each.seconds for name, each in search.named.items()}
    return [plan_of(each, bound, seconds_of) for each in (found, *others[:named])]


def _refuse_impossible(request: PlanRequest, budget: SearchBudget) -> None:
    """Refuse limits that are too small for what every plan holds: all weights, and each layer on some device.

    A short search finds limits that would do, for the message.
    """
    layers, devices = request.profile.layers, len(request.devices)
    if not shapes(devices, len(layers), request.schedules):
        raise ValueError(
            f"schedules {', '.join(map(repr, request.schedules or ()))} have several stages for each worker, which "
            f"{counted(len(layers), 'layer')} for {counted(devices, 'device')} do not allow: cut layers finer, give "
            "fewer devices, or let other schedules be chosen"
        )
    sums = request.sums(max(request.chunks))
    least = [fixed + size for fixed, size in zip(sums.fixed, sums.least_bytes(), strict=True)]
    number = least.index(max(least))
    needed, room, there = sum(sums.fixed), max(request.limits), sum(request.limits)
    if least[number] > room:
        text = (
            f"layer {number} ({layers[number].type} {layers[number].name!r}) needs "
            f"{memory_text(least[number], 'bytes')} for its weights, gradients, optimizer and one micro-batch, and the "
            f"largest limit is {memory_text(room, 'bytes')}: cut the layer finer, raise the limit, or make "
            "micro-batches smaller"
        )
    elif there < inf and needed > there:
        text = (
            f"weights, gradients and optimizer need {memory_text(needed, 'bytes')}, and all devices together may hold "
            f"{memory_text(there, 'bytes')}: the smallest limit that could do is "
            f"{memory_text(needed / devices, 'bytes')} for each of {counted(devices, 'worker')}"
        )
    else:
        return
    scale = max(least[number] / room, needed / there)
    larger = replace(request, limits=tuple(limit * scale for limit in request.limits))
    _, found = _search_for_memory(larger, budget)
    fitting = limits_that_fit(request, _devices_of(found), found.workers)
    raise ValueError(f"{text}; a plan was found that fits with {fitting}")


def _search_for_memory(request: PlanRequest, budget: SearchBudget) -> tuple[Search, Candidate]:
    """A short search for what needs little memory, with the smallest micro-batches."""
    seconds = budget.seconds if budget.iterations < inf else min(_SECONDS, budget.seconds)
    short = SearchBudget(seconds, min(_CANDIDATES, budget.iterations))
    search = Search(replace(request, chunks=(max(request.chunks),)), short, lambda line: None)
    return search, search.run()


def _devices_of(found: Candidate) -> list[str]:
    return [found.request.devices[index] for index in found.choice.order]


def limits_that_fit(request: PlanRequest, devices: Sequence[str], workers: Sequence[WorkerBytes]) -> str:
    """The given limits, raised to what workers need, in words that can be given as `memory=`.

    Args:
        request: what was asked for.
        devices: of the workers.
        workers: what they hold.
    """
    count = Counter(request.devices)  # workers that share a device; a kind stands for devices of their own
    sharing = {name: count[name] if name in request.profile.devices else 1 for name in count}
    needed = {
        name: limit * sharing[name] for name, limit in zip(request.devices, request.limits, strict=True) if limit < inf
    }
    alike = len(needed) == len(sharing) and len({*needed.values()}) == 1
    for name, held in zip(devices, workers, strict=True):
        if name in needed:
            needed[name] = max(needed[name], held.total * sharing[name])
    several = " and ".join(f"the {sharing[name]} workers on {name}" for name in needed if sharing[name] > 1)
    shared = f", of which {several} have equal shares" if several else ""
    if alike:
        return f"a limit of {memory_size(max(needed.values()))}{shared}"
    return f"the limits { ({name: memory_size(size) for name, size in needed.items()}) }{shared}"
