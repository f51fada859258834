"""A plan for workers that are processes: each measures its own device and link, the first plans, and all get the plan.

A rank cannot be given another place in its mesh, so the order of the devices stays as it is. Each worker is a kind of
device of its own, which is called "rank 0" and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import pipework
from pipework.planning.layer_costs import DeviceKind, LinkSpeed
from pipework.planning.plan import Plan
from pipework.planning.profiles import Profile
from pipework.planning.request import make_request
from pipework.planning.search import best_plans
from pipework.saving.collective import run_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from pipework.distributed.mesh import Mesh
    from pipework.planning.search import Budget

_SMALL, _LARGE = 2**10, 2**22  # numbers of 4 bytes
_TIMES = 7


def plan_on_ranks(
    mesh: Mesh | DeviceMesh,
    measure: Callable[[torch.device, int], Profile],
    memory: float | str | Mapping[str, float | str] | None,
    options: Mapping[str, Any],
    budget: Budget,
    report: Callable[[str], None],
) -> Plan:
    """The plan that all ranks get; all of them call this.

    Args:
        mesh: see `Pipe`.
        measure: profiles the layers on a device, for so many workers.
        memory: see `plan`; a device is called "rank 0", or by its kind.
        options: of `make_request`.
        budget: of the search.
        report: called with a line of text for each step.

    Raises:
        RuntimeError: another rank failed.
        ValueError: no plan fits.
    """
    from pipework.distributed.mesh import mesh_of  # needs torch.distributed, which a build may lack

    device, workers = mesh_of(mesh).device, len(mesh_of(mesh).ranks)
    pipe = pipework.Pipe(
        nn.Sequential(*(nn.Identity() for _ in range(workers))), chunks=2, balance=[1] * workers, mesh=mesh
    )
    group = pipe.ranks
    links = _measured_links(pipe)
    measured = run_on_all_ranks(group, "measure the layers", lambda: measure(device, workers), Profile.to_json).shared
    found = [Profile.from_json(text, f"of rank {n}") for n, text in enumerate(measured)]
    whole = profile_of_ranks(found, group.everyone, links)
    if isinstance(memory, Mapping):  # by rank, or by the device that the rank has
        kinds = [next(iter(each.kinds)) for each in found[:workers]]
        by_kind = {name: memory[kind] for name, kind in zip(whole.kinds, kinds, strict=True) if kind in memory}
        memory = by_kind | {name: size for name, size in memory.items() if name not in kinds}

    def planned() -> str:
        if group.rank:
            return ""
        request = replace(make_request(whole, list(whole.kinds), memory, **options), keeps_order=True)
        return best_plans(request, budget, report)[0].to_json()

    text = run_on_all_ranks(group, "make a plan", planned, str).shared[0]
    return Plan.from_json(text, "of rank 0")


def profile_of_ranks(profiles: Sequence[Profile], ranks: Sequence[int], links: Sequence[LinkSpeed]) -> Profile:
    """One profile of what all ranks have measured; a worker is as fast as the slowest of its replicas.

    Args:
        profiles: of each rank, replica by replica.
        ranks: their numbers.
        links: from each worker to the next.
    """
    names = [f"rank {rank}" for rank in ranks[: len(links) + 1]]
    measured = [kind for each in profiles for kind in each.kinds.values()]  # one of each rank
    kinds = {name: max(measured[worker :: len(names)], key=_seconds) for worker, name in enumerate(names)}
    speeds: dict[tuple[str, str], LinkSpeed] = {}
    if links:  # workers that are no neighbours have the slowest link
        worst = LinkSpeed(max(link.latency for link in links), min(link.bytes_per_second for link in links))
        speeds = dict.fromkeys(combinations(names, 2), worst) | dict(zip(pairwise(names), links, strict=True))
    return replace(profiles[0], kinds=kinds, devices={}, links=speeds)


def _seconds(kind: DeviceKind) -> float:
    return sum(sum(layer) for row in kind.seconds for layer in row)


def _measured_links(pipe: pipework.Pipe) -> list[LinkSpeed]:
    """The link from each worker to the next: the time from the end of one stage's forward to the begin of the next."""
    pipe.eval()
    small, large = (_waits(pipe, size) for size in (_SMALL, _LARGE))
    return [
        LinkSpeed(low, 4 * (_LARGE - _SMALL) / max(high - low, 1e-9)) for low, high in zip(small, large, strict=True)
    ]


def _waits(pipe: pipework.Pipe, size: int) -> list[float]:
    x = torch.zeros(1, size)
    rounds = []
    for number in range(_TIMES + 1):
        with torch.no_grad(), pipe.record() as recording:
            pipe(x)
        if number:  # the first message of a form is described
            spans = sorted((each.action.stage, each.start, each.end) for each in recording.timeline().intervals)
            rounds.append([later[1] - earlier[2] for earlier, later in pairwise(spans)])
    return [max(0.0, median(column)) for column in zip(*rounds, strict=True)]
