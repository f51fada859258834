"""A plan whose stages fit as they were measured: a stage does not need just the sum of what its layers need."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from pipework.planning.plan_profile import best_plans
from pipework.planning.profiling.trial import by_speed
from pipework.planning.profiling.verify import measured_plan, with_limits
from pipework.planning.search.limits import limits_that_fit
from pipework.schedule.draw.units import memory_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from pipework.planning.plan import Plan
    from pipework.planning.profiling.micro_batches import SampleBatch
    from pipework.planning.request import PlanRequest
    from pipework.planning.search.budget import SearchBudget
    from pipework.planning.search.candidate import WorkerBytes

# Schedules with a name that are tried beside the best plan, if they are about as fast by the profile.
_NAMED, _WITHIN = 5, 1.15
# Of the budget, for the first search and for those that follow if the stages that it found do not fit.
_SHARES = 0.6, 0.25, 0.15


def plan_that_fits(
    request: PlanRequest,
    model: nn.Sequential,
    batch: SampleBatch,
    budget: SearchBudget,
    timeout: float,
    report: Callable[[str], None],
) -> Plan:
    """The best plan whose stages fit as they were measured.

    Args:
        request: what is to be planned, with a profile of this machine.
        model: its layers.
        batch: the mini-batch.
        budget: of the search.
        timeout: seconds to measure each stage.
        report: called with a line of text for each step.

    Raises:
        ValueError: no plan fits.
    """
    limits = dict(zip(request.devices, request.limits, strict=True))
    given = request
    tried: list[Plan] = []
    once = min(request.limits) == inf or batch.rows != request.batch
    for share in (1.0,) if once else _SHARES:
        try:
            plans = best_plans(request, budget.part(share), report, named=_NAMED, within=_WITHIN)
        except ValueError:
            if not tried:
                raise
            break  # nothing fits what the last plan has shown to be left for layers
        if batch.rows != plans[0].batch:
            return plans[0]  # for a mini-batch that is not here
        over = inf
        for plan, costs in by_speed(plans, model, batch, timeout, report):
            measured = with_limits(measured_plan(plan, costs, model, batch, timeout, report), limits)
            if all(worker.fits for worker in measured.workers):
                return measured
            tried.append(measured)
            pairs = zip(measured.workers, plan.workers, strict=True)
            over = min(over, max(now.total / before.total for now, before in pairs if not now.fits))
        # What does not fit was planned to be smaller: so much that this plan, and those like it, are excluded.
        report(f"measured as a whole, a worker needs {over:.3g} times what its layers need: planned again with less")
        request = replace(request, limits=tuple(limits[device] / over for device in request.devices))
    best = min(tried, key=lambda plan: max(map(_share, plan.workers)))
    held = max(best.workers, key=_share)
    worst = best.workers.index(held)
    raise ValueError(
        f"no plan fits: in the best that was found, worker {worst} ({best.devices[worst]}) needs "
        f"{memory_text(held.total, 'bytes')}, measured as a whole, and may hold {memory_text(held.limit, 'bytes')}; it "
        f"fits with {limits_that_fit(given, best.devices, best.workers)}; raise the limits, use more devices, "
        "or give a smaller mini-batch"
    )


def _share(held: WorkerBytes) -> float:
    return held.total / held.limit
