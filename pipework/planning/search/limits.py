"""Limits of memory that are too small: what is missing, and which would do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from pipework.planning.memory_size import memory_size
from pipework.planning.search.budget import SearchBudget
from pipework.planning.search.choices import shapes
from pipework.planning.search.search import Search
from pipework.schedule.draw.units import counted, memory_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.planning.request import PlanRequest
    from pipework.planning.search.candidate import Candidate, WorkerBytes

_CANDIDATES, _SECONDS = 24, 5.0  # to find what needs little memory


def refuse_impossible(request: PlanRequest, budget: SearchBudget) -> None:
    """Refuse limits that are too small for what every plan holds: all weights, and each layer on some device.

    A short search finds limits that would do.

    Args:
        request: what is asked for.
        budget: of the search for the plan.

    Raises:
        ValueError: no schedule that may be chosen goes with so many devices and layers, a layer is larger than any
            device, or all layers together are larger than all devices.
    """
    layers, devices = request.profile.layers, len(request.devices)
    if not shapes(devices, len(layers), request.schedules):
        raise ValueError(
            f"schedules {', '.join(map(repr, request.schedules or ()))} have several stages for each worker, which "
            f"{counted(len(layers), 'layer')} for {counted(devices, 'device')} do not allow: cut layers finer, give "
            "fewer devices, or let other schedules be chosen"
        )
    sums = request.sums(max(request.chunks))
    least, room = sums.layer_least_bytes(), max(request.limits)
    number = max(range(len(layers)), key=lambda index: sums.fixed[index] + least[index])
    layer, fixed, held = layers[number], sums.fixed[number], least[number]
    needed, there = sum(sums.fixed), sum(request.limits)
    if fixed + held > room:
        text = (
            f"layer {number} ({layer.type} {layer.name!r}) needs {memory_text(fixed + held, 'bytes')} (weights, "
            f"gradients and optimizer {memory_text(fixed, 'bytes')}, one micro-batch {memory_text(held, 'bytes')}), "
            f"and the largest limit is {memory_text(room, 'bytes')}: cut the layer finer, raise the limit, or make "
            "micro-batches smaller"
        )
    elif there < inf and needed > there:
        each = "device" if set(_sharing(request).values()) == {1} else "worker"
        share = f" for each of {devices} {each}s" if devices > 1 else ""
        text = (
            f"weights, gradients and optimizer need {memory_text(needed, 'bytes')}, and all devices together may hold "
            f"{memory_text(there, 'bytes')}: the smallest limit that could do is "
            f"{memory_text(needed / devices, 'bytes')}{share}"
        )
    else:
        return
    scale = max((fixed + held) / room, needed / there)
    larger = replace(request, limits=tuple(limit * scale for limit in request.limits))
    _, found = search_for_memory(larger, budget)
    devices_of = [request.devices[index] for index in found.choice.order]
    raise ValueError(f"{text}; a plan was found that fits with {limits_that_fit(request, devices_of, found.workers)}")


def search_for_memory(request: PlanRequest, budget: SearchBudget) -> tuple[Search, Candidate]:
    """A short search for what needs little memory, with the smallest micro-batches; and the best that it found.

    Args:
        request: what is asked for.
        budget: of the search for the plan, which this one does not exceed.
    """
    seconds = budget.seconds if budget.iterations < inf else min(_SECONDS, budget.seconds)
    short = SearchBudget(seconds, min(_CANDIDATES, budget.iterations))
    search = Search(replace(request, chunks=(max(request.chunks),)), short, lambda line: None)
    return search, search.run()


def no_plan_fits(found: Candidate) -> ValueError:
    """The error of a search whose best candidate does not fit."""
    worst = max(
        range(found.choice.workers), key=lambda worker: found.workers[worker].total / found.workers[worker].limit
    )
    held = found.workers[worst]
    devices = [found.request.devices[index] for index in found.choice.order]
    return ValueError(
        f"no plan fits: the best that was found needs {memory_text(held.total, 'bytes')} on worker {worst} "
        f"({devices[worst]}), which may hold {memory_text(held.limit, 'bytes')} ({held.total / held.limit - 1:.2%} too "
        f"much), and fits with {limits_that_fit(found.request, devices, found.workers)}; raise the limits, search "
        "longer, use more devices, or make micro-batches smaller (more chunks)"
    )


def limits_that_fit(request: PlanRequest, devices: Sequence[str], workers: Sequence[WorkerBytes]) -> str:
    """The given limits, raised to what workers need, in words that can be given as `memory=`.

    Args:
        request: what was asked for.
        devices: of the workers.
        workers: what they hold.
    """
    sharing = _sharing(request)
    given = {
        name: limit * sharing[name] for name, limit in zip(request.devices, request.limits, strict=True) if limit < inf
    }
    needed = dict(given)
    for name, held in zip(devices, workers, strict=True):
        if name in needed:
            needed[name] = max(needed[name], held.total * sharing[name])
    several = [f"the {sharing[name]} workers on {name}" for name in needed if sharing[name] > 1]
    shared = f", of which {' and '.join(several)} have equal shares" if several else ""
    if len(given) == len(sharing) and len(set(given.values())) == 1:
        return f"a limit of {memory_size(max(needed.values()))}{shared}"
    return f"the limits { ({name: memory_size(size) for name, size in needed.items()}) }{shared}"


def _sharing(request: PlanRequest) -> dict[str, int]:
    """How many workers each device has; a kind stands for devices of their own."""
    count = Counter(request.devices)
    return {name: count[name] if name in request.profile.devices else 1 for name in count}
