"""A plan for workers that are processes: the first measures the layers, all measure their links, and all get the plan.

The devices of all ranks are of one kind. A rank cannot be given another place in its mesh, so their order stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import pipework
from pipework.planning.layer_costs import LinkSpeed
from pipework.planning.measuring.links import device_kind
from pipework.planning.plan import Plan
from pipework.planning.request import make_request
from pipework.planning.search import best_plans
from pipework.runtime.free_memory import free_host_memory, processes_on_host
from pipework.saving.collective import run_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from pipework.distributed.mesh import Mesh
    from pipework.planning.profiles import Profile
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
        memory: see `plan`.
        options: of `make_request`.
        budget: of the search.
        report: called with a line of text for each step.

    Raises:
        RuntimeError: another rank failed.
        ValueError: the ranks have devices of several kinds, or no plan fits.
    """
    from pipework.distributed.mesh import mesh_of  # needs torch.distributed, which a build may lack

    device, workers = mesh_of(mesh).device, len(mesh_of(mesh).ranks)
    kind = device_kind(device)
    pipe = pipework.Pipe(
        nn.Sequential(*(nn.Identity() for _ in range(workers))), chunks=2, balance=[1] * workers, mesh=mesh
    )
    link = _slowest_link(pipe)
    own = kind, free_host_memory() / processes_on_host()
    kinds, free = zip(*run_on_all_ranks(pipe.ranks, "name its device", lambda: own, list).shared, strict=True)
    if len({*kinds}) > 1:
        raise ValueError(
            f"the ranks have devices of several kinds, {', '.join(sorted({*kinds}))}: profile the layers on each kind, "
            "plan for these profiles, and load that plan on all ranks"
        )

    def planned() -> str:
        if pipe.ranks.rank:
            return ""
        whole = replace(measure(device, workers), devices={}, links={(kind, kind): link})
        request = make_request(whole, [kind] * workers, memory, **options)
        request = replace(request, keeps_order=True, host_memory=sum(free))
        return best_plans(request, budget, report)[0].to_json()

    text = run_on_all_ranks(pipe.ranks, "make a plan", planned, str).shared[0]
    return Plan.from_json(text, "of rank 0")


def _slowest_link(pipe: pipework.Pipe) -> LinkSpeed:
    """That from a worker to the next: the time from the end of one stage's forward to the begin of the next."""
    pipe.eval()
    low, high = (max(_waits(pipe, size), default=0.0) for size in (_SMALL, _LARGE))
    return LinkSpeed(low, 4 * (_LARGE - _SMALL) / max(high - low, 1e-9))


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
