"""Measures the stages of a plan as they will run: layers that are joined need other times and bytes than alone."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipework.model.sequential import named_layers
from pipework.planning.certificate import certify
from pipework.planning.prediction.grouped import grouped
from pipework.planning.prediction.optimizer_bytes import optimizer_bytes
from pipework.planning.prediction.predict import cpu_workers_of, measure_stages, predicted
from pipework.planning.profiling.layers import ignored
from pipework.planning.profiling.step_times import with_times
from pipework.planning.search.candidate import WorkerBytes
from pipework.schedule import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipework.planning.plan import Plan
    from pipework.planning.prediction.predict import Prediction
    from pipework.planning.prediction.stage_copy import Measured
    from pipework.planning.profiling.micro_batches import SampleBatch
    from pipework.schedule import Costs, Schedule

_ROUNDS = 3
_SLOWED = 1.25  # of the step by the profile; less is usual


def measured_plan(
    plan: Plan,
    recorded: Costs | None,
    module: nn.Sequential,
    batch: SampleBatch,
    timeout: float,
    report: Callable[[str], None],
) -> Plan:
    """The plan with the measured times and bytes of its stages, each as a whole.

    Args:
        plan: for this machine.
        recorded: the times of its actions in its steps; None: its stages are measured, one after the other.
        module: its layers.
        batch: the mini-batch.
        timeout: seconds to measure each stage.
        report: called with a line of text for each stage.
    """
    stages = grouped(named_layers(module), plan.balance)
    places = [torch.device(plan.devices[worker]) for worker in plan.schedule.placement]
    sample = batch.micro_batch(-(-plan.batch // plan.chunks))
    rounds = [
        measure_stages(
            stages,
            places,
            sample,
            timeout / _ROUNDS if recorded is None else None,
            report if recorded is None and number == 0 else ignored,
            cpu_workers=cpu_workers_of(plan.schedule.placement, places),
            split=plan.schedule.split_stages,
        )
        for number in range(_ROUNDS if recorded is None else 1)
    ]
    measured = [_median(each) for each in zip(*(found for found, _ in rounds), strict=True)]
    notes = plan.notes
    if recorded is not None:
        measured = _timed(measured, recorded, plan.schedule)
    elif elsewhere := rounds[0][1]:
        notes += (
            f"stage {', '.join(map(str, elsewhere))} was measured on the CPU, because its device ran out of memory: "
            "its times are the CPU's",
        )
    found = predicted(
        stages,
        places,
        plan.schedule,
        sample,
        measured,
        batch.bytes_on(places[0], places[-1]),
        functools.partial(optimizer_bytes, plan.optimizer),
    )
    if recorded is None:
        costs = replace(found.costs, transfer=plan.costs.transfer, skip_transfer=plan.costs.skip_transfer)
    else:
        costs = with_times(found.costs, recorded)
    again = simulate(plan.schedule, costs)
    if again.makespan > _SLOWED * plan.seconds > 0:
        notes += (
            f"its step takes {again.makespan / plan.seconds:.2g} times what it would with layers as fast as alone: "
            "workers slow each other down, for example if they share cores, memory or a link",
        )
    workers = _workers(plan, found)
    # The bound of all plans comes from the profile, in which other layers may have been measured too long.
    certificate = certify(again, workers, plan.balance, min(plan.certificate.any_bound, again.makespan))
    return replace(
        plan, notes=notes, costs=costs, workers=workers, certificate=certificate, profile_seconds=plan.seconds
    )


def _timed(measured: Sequence[Measured], recorded: Costs, schedule: Schedule) -> list[Measured]:
    """The bytes that were measured, with the times of steps: what workers of one device hold at once follows them."""
    seconds, split = recorded.spread(schedule.stages, len(schedule.skips)).duration, schedule.split_stages
    return [
        replace(
            each,
            forward=seconds["F"][stage],
            first_half=seconds["I" if stage in split else "B"][stage],
            second_half=seconds["W"][stage] if stage in split else 0.0,
        )
        for stage, each in enumerate(measured)
    ]


def with_limits(plan: Plan, limits: Mapping[str, float]) -> Plan:
    """The plan with other limits, by device."""
    workers = zip(plan.workers, plan.devices, strict=True)
    return replace(plan, workers=tuple(replace(held, limit=limits[device]) for held, device in workers))


def _median(rounds: tuple[Measured, ...]) -> Measured:
    """The round with the median time."""
    by_time = sorted(rounds, key=lambda each: each.forward + each.first_half + each.second_half)
    return by_time[len(by_time) // 2]


def _workers(plan: Plan, found: Prediction) -> tuple[WorkerBytes, ...]:
    """What each worker holds; those of one device share what it needs beside their own."""
    schedule = plan.schedule
    fixed = [0.0] * schedule.workers
    for stage, worker in zip(found.stages, schedule.placement, strict=True):
        fixed[worker] += stage.total - stage.activations
    peaks = found.simulation.peak_memory
    workers = []
    for worker, device in enumerate(plan.devices):
        place = torch.device(device)
        sharing = [other for other, name in enumerate(plan.devices) if torch.device(name) == place]
        rest = found.device_bytes[place] - sum(fixed[other] + peaks[other] for other in sharing)
        limit = plan.workers[worker].limit
        workers.append(WorkerBytes(fixed[worker], peaks[worker], max(0.0, rest) / len(sharing), limit))
    return tuple(workers)
