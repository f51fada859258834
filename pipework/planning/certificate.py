"""How far a plan is from the best: lower bounds, and what keeps the step from being shorter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipework.planning.plan import Certificate, WorkerBytes
from pipework.schedule import lower_bounds

if TYPE_CHECKING:
    from pipework.planning.request import PlanRequest
    from pipework.schedule import Simulation


def certify(
    simulation: Simulation, workers: Sequence[WorkerBytes], balance: Sequence[int], any_bound: float
) -> Certificate:
    """Bound a step from below.

    Args:
        simulation: of the step.
        workers: the bytes of each worker.
        balance: the layers of each stage.
        any_bound: what no plan undercuts, see :func:`any_plan_bound`.
    """
    schedule = simulation.schedule
    again = Counter(action.stage for order in schedule.orders for action in order if action.kind == "R")
    room = [each.limit - each.fixed - each.temporary for each in workers]
    within, free = (
        lower_bounds(
            schedule.placement,
            schedule.micro_batches,
            simulation.costs,
            memory_limit=limit,
            recomputed=[again[stage] for stage in range(schedule.stages)],
        ).makespan
        for limit in ([max(each) for each in zip(room, simulation.peak_memory, strict=True)], None)
    )
    step = simulation.makespan
    # Rounding may put a bound above what is reached.
    own, every = (step if step < bound < step * (1 + 1e-9) else bound for bound in (within, any_bound))
    return Certificate(own, every, _binding(simulation, workers, balance, memory=within > free * (1 + 1e-9)))


def any_plan_bound(request: PlanRequest) -> float:
    """The seconds that no plan undercuts: the shortest for any of the numbers of micro-batches.

    With m micro-batches, a step takes at least:

    * the work of all layers, shared among all workers: on worker w it is done at most r_w times as fast as on the
      fastest kind of device for each layer, so it takes m (t_1 + ... + t_n) / (r_1 + ... + r_p);
    * m times the longest layer, since a layer lies on one worker.

    If the rows cannot be shared evenly, some micro-batches have a row less than others, and take less.
    """
    return min(_bound_with(request, chunks) for chunks in request.chunks)


def _bound_with(request: PlanRequest, chunks: int) -> float:
    largest = request.sums(chunks)
    larger = request.batch % chunks or chunks
    # One row less takes less time, but a measurement may have found more, and a plan counts the largest micro-batch.
    smaller = request.sums_of(largest.rows - 1) if larger < chunks else largest
    by_kind = {
        kind: [
            larger * most + (chunks - larger) * min(least, most)
            for least, most in zip(smaller.layer_seconds(kind), largest.layer_seconds(kind), strict=True)
        ]
        for kind in request.kinds
    }
    fastest = [min(column) for column in zip(*by_kind.values(), strict=True)]
    speed = [
        max((best / own for best, own in zip(fastest, by_kind[kind], strict=True) if own), default=1.0)
        for kind in request.kinds
    ]
    return float(max(sum(fastest) / sum(speed), max(fastest)))


def _binding(simulation: Simulation, workers: Sequence[WorkerBytes], balance: Sequence[int], *, memory: bool) -> str:
    """What keeps a step from being shorter: transfers, memory, or a worker's work."""
    schedule, step = simulation.schedule, simulation.makespan
    if step <= 0:
        return "nothing takes time"
    busiest = max(range(schedule.workers), key=lambda worker: simulation.busy[worker])
    share, exposed = simulation.busy[busiest] / step, simulation.exposed_communication / step
    if exposed > max(0.05, 1 - share - exposed):
        source, target = _longest_transfer(simulation)
        return f"transfers, which delay the step by {exposed:.0%}; the longest is from stage {source} to {target}"
    used, stages = [each.total / each.limit for each in workers], schedule.stages_of(busiest)
    again = sum(action.kind == "R" for action in schedule.orders[busiest])
    if again and used[busiest] > 0:
        return (
            f"the memory of worker {busiest}, {used[busiest]:.0%} of which are used, although it recomputes {again} of "
            f"its {schedule.micro_batches * len(stages)} forwards"
        )
    if memory or (max(used) > 0.95 and share < 0.9):
        return f"the memory of worker {used.index(max(used))}, of which {max(used):.0%} are used"
    alone = len(stages) == 1 and balance[stages[0]] == 1 and share > 0.8
    what = f"layer {sum(balance[: stages[0]])}, alone on" if alone else "the work of"
    return f"{what} worker {busiest}, which is busy for {share:.0%} of the step"


def _longest_transfer(simulation: Simulation) -> tuple[int, int]:
    """The stages between which a message, or a skip connection, takes longest."""
    placement, skips = simulation.schedule.placement, simulation.schedule.skips
    spread = simulation.costs.spread(len(placement), len(skips))
    hops = {(stage, stage + 1): time for stage, time in enumerate(spread.transfer)}
    hops.update(zip(skips, spread.skip, strict=True))
    return max(hops, key=lambda ends: hops[ends] if placement[ends[0]] != placement[ends[1]] else 0.0)
