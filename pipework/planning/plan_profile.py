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
from pipework.planning.search.limits import no_plan_fits, refuse_impossible, search_for_memory
from pipework.planning.search.search import Search, SearchBudget
from pipework.schedule import simulate
from pipework.schedule.argument_checks import positive_integers

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
    return plan_request(request, seconds, iterations, progress)


def plan_request(
    request: PlanRequest,
    seconds: float | None,
    iterations: int | None,
    progress: Callable[[str], None] | None,
) -> Plan:
    """Search for the fastest step of a checked request; see :func:`plan_profile`."""
    return best_plans(request, seconds, iterations, progress)[0]


def best_plans(
    request: PlanRequest,
    seconds: float | None,
    iterations: int | None,
    progress: Callable[[str], None] | None,
    *,
    named: int = 0,
    within: float = inf,
) -> list[Plan]:
    """The best plan, and after it the best of other schedules with a name.

    Args:
        request: checked.
        seconds: see :func:`plan_profile`, like `iterations` and `progress`.
        iterations: see there.
        progress: see there.
        named: how many others at most.
        within: they take at most so many times the best plan's seconds.
    """
    budget = checked_budget(seconds, iterations)
    report = progress or logging.getLogger("pipework").info
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
        certificate = certify(simulation, each.workers, each.choice.balance, bound, search.proven(each))
        plans.append(Plan.of(each, certificate, seconds_of, doubts(each)))
    return plans


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
