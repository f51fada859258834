"""Plans from a profile alone, without the model and its devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from pipework.planning.certificate import any_plan_bound, certify
from pipework.planning.doubts import doubts
from pipework.planning.plan import Plan
from pipework.planning.request import make_request
from pipework.planning.search.budget import SearchBudget, checked_budget
from pipework.planning.search.limits import no_plan_fits, refuse_impossible, search_for_memory
from pipework.planning.search.search import Search
from pipework.schedule import simulate

if TYPE_CHECKING:
    from pipework.planning.profiles.profile import Profile
    from pipework.planning.request import PlanRequest


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
    all schedules that have a name; then schedules are made for the best of them. What is best is the simulated step
    with the profile's times.

    Args:
        profile: of the layers.
        devices: one for each worker: devices of the profile, or kinds of device.
        memory: the bytes that each device may hold, such as "24GiB", for all or by device or kind. None: what the
            profile says that they have.
        batch: rows of a mini-batch; None: the profile's.
        chunks: the number of micro-batches, or several to choose from; None: the planner's choice.
        optimizer: how many numbers it keeps for each trained parameter: 2 for Adam, 0 for plain SGD.
        schedules: names that may be chosen; None: all, and schedules that are made for this model.
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
    refuse_impossible(request, budget)
    search = Search(request, budget, report)
    found = search.run()
    if not found.fits and len(request.chunks) > 1:  # the time may have been too short for the smallest micro-batches
        search, found = min((search, found), search_for_memory(request, budget), key=lambda pair: pair[1].rank)
    if not found.fits:
        raise no_plan_fits(found)
    others = sorted(search.named.values(), key=lambda each: each.rank)
    others = [each for each in others if each is not found and each.seconds <= within * found.seconds]
    bound = any_plan_bound(request)
    seconds_of = {name: each.seconds for name, each in search.named.items()}
    plans = []
    for each in (found, *others[:named]):
        simulation = simulate(each.schedule, each.costs)
        certificate = certify(simulation, each.workers, each.choice.balance, bound)
        plans.append(Plan.of(each, certificate, seconds_of, doubts(each)))
    return plans
