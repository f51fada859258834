"""What a pipe with settings of one's own costs by a profile, to compare a plan with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipework.planning.candidate import Choice, evaluate, plan_of
from pipework.planning.certificate import any_plan_bound
from pipework.planning.request import make_request
from pipework.schedule import Schedule, build, schedule_spec, with_recompute
from pipework.schedule.argument_checks import checked_tuple, positive_integers
from pipework.schedule.draw.units import counted, memory_text
from pipework.schedule.edges import recomputed

if TYPE_CHECKING:
    from pipework.planning.plan import Plan
    from pipework.planning.profiles import Profile


def plan_of_settings(
    profile: Profile,
    devices: Sequence[str],
    balance: Sequence[int],
    chunks: int,
    schedule: str | Schedule,
    checkpoint: str,
    memory: float | str | Mapping[str, float | str] | None,
    batch: int | None,
    optimizer: float,
) -> Plan:
    """The plan that the settings of a pipe are; see :meth:`Profile.predict`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or they do not go together.
    """
    positive_integers(chunks=chunks)
    request = make_request(profile, devices, memory, batch=batch, chunks=chunks, optimizer=optimizer)
    workers, layers = len(request.devices), len(profile.layers)
    cut = checked_tuple("balance", balance, "[3, 3]")
    positive_integers(**{f"balance[{stage}]": each for stage, each in enumerate(cut)})
    if sum(cut) != layers:
        raise ValueError(f"balance is {list(cut)}, which sums to {sum(cut)}, and the profile has {layers} layers")
    made = replace(_schedule(schedule, workers, len(cut), chunks, checkpoint), skips=())
    candidate = evaluate(request, Choice(tuple(range(workers)), made.placement, chunks, cut, (), made))
    notes = [
        f"this does not fit: worker {worker} needs {memory_text(held.total, 'bytes')} and may hold "
        f"{memory_text(held.limit, 'bytes')}"
        for worker, held in enumerate(candidate.workers)
        if not held.fits
    ]
    return plan_of(candidate, any_plan_bound(request), notes=notes)


def _schedule(schedule: str | Schedule, workers: int, stages: int, chunks: int, checkpoint: str) -> Schedule:
    """What a pipe runs: unlike a plan, it makes schedules by name for equal stages."""
    modes = {"always": chunks, "except_last": chunks - 1, "never": 0}
    if checkpoint not in modes:
        raise ValueError(f"checkpoint is {checkpoint!r}: wanted one of {', '.join(map(repr, modes))}")
    if isinstance(schedule, Schedule):
        found = schedule.workers, schedule.stages, schedule.micro_batches
        if found != (workers, stages, chunks):
            raise ValueError(
                f"schedule {schedule.name!r} is for (workers, stages, micro-batches) = {found}, and devices=, balance= "
                f"and chunks= are for {workers, stages, chunks}"
            )
        return schedule if recomputed(schedule) else with_recompute(schedule, modes[checkpoint])
    spec = schedule_spec(schedule)
    wanted = workers * spec.stages_per_worker
    if stages != wanted and (stages % workers or not spec.several):
        other = ", or another multiple of the devices" if spec.several else ""
        raise ValueError(
            f"balance has {counted(stages, 'stage')} for {counted(workers, 'device')}: schedule {schedule!r} wants "
            f"{wanted}{other}"
        )
    made = build(schedule, workers=workers, chunks=chunks, stages_per_worker=stages // workers)
    return with_recompute(made, modes[checkpoint])
