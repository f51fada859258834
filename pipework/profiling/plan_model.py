"""`pipework.plan`: from a model and a mini-batch, or a profile, to a plan."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework.assignment.devices import Machine, checked_devices, default_devices
from pipework.balance.by_time import device_kind
from pipework.balance.checks import not_sequential
from pipework.planning.plan import Plan
from pipework.planning.plan_profile import best_plans, checked_budget, plan_request
from pipework.planning.profiles.profile import Profile
from pipework.planning.request import check_options, checked_schedules, make_request
from pipework.planning.search.limits import limits_that_fit
from pipework.profiling.measure import checked_report, micro_batch_sizes, profile
from pipework.profiling.micro_batches import SampleBatch
from pipework.profiling.on_ranks import plan_on_ranks
from pipework.profiling.trial import by_speed
from pipework.profiling.verify import measured_plan, with_limits
from pipework.schedule.draw.units import memory_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from pipework.distributed.mesh import Mesh
    from pipework.model.with_device import Device
    from pipework.planning.request import PlanRequest
    from pipework.planning.search.candidate import WorkerBytes

# Schedules with a name that are tried beside the best plan, if they are about as fast by the profile.
_NAMED, _WITHIN = 3, 1.15
_TRIES = 3  # a plan is made again if its stages, measured as a whole, do not fit


def plan(
    model: nn.Sequential | Profile,
    sample: Tensor | tuple[Any, ...] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    devices: Sequence[Device] | None = None,
    memory: float | str | Mapping[str, float | str] | None = None,
    batch: int | None = None,
    chunks: int | Sequence[int] | None = None,
    optimizer: float = 2.0,
    schedules: Sequence[str] | None = None,
    seconds: float | None = 30.0,
    iterations: int | None = None,
    keywords: Mapping[str, Any] | None = None,
    timeout: float = 0.2,
    progress: Callable[[str], None] | None = None,
    mesh: Mesh | DeviceMesh | None = None,
) -> Plan:
    """Find the fastest training step that fits, and say how far from the best possible it is.

    The layers are measured with :func:`pipework.profile`, unless `model` is a profile. Then cuts, numbers of
    micro-batches, schedules, recomputation and orders of unequal devices are searched; each is simulated with what was
    measured. Steps of the best plans are then run on copies of the layers, and the fastest is taken.

    Args:
        model: the layers, or a profile of them.
        sample: the inputs of a mini-batch; a tuple is spread into positional arguments.
        target: of the loss. None: only for schedules=['gpipe'], after whose forwards the loss may be computed outside.
        loss_fn: as for `Pipe`.
        devices: one for each worker. None: all accelerators, else CPU workers; with a profile they must be given.
        memory: the bytes that each device may hold, or texts such as "24GiB"; one for all, or by device. None: what
            accelerators have. Several CPU workers share the CPU's evenly.
        batch: the rows of a mini-batch; None: those of the sample.
        chunks: the number of micro-batches, or several to choose from; None: the planner's choice.
        optimizer: how many numbers it keeps for each trained parameter: 2 for Adam, 0 for plain SGD.
        schedules: names that may be chosen; None: all, and schedules that are made for this model.
        seconds: to search, after the measurement.
        iterations: candidates to try instead, which gives the same plan for the same profile.
        keywords: keyword arguments of the first layer.
        timeout: seconds to measure each layer, and for each stage of the plan its steps.
        progress: called with a line of text for each step; None: lines are logged to "pipework" (INFO).
        mesh: what `pipework.init()` returned: each worker is a process. All of them call this with the same model and
            mini-batch; each measures its own device and the link to the next, and all get the same plan. In `memory`,
            devices are "rank 0" and so on. Steps are not measured. None: workers are threads.

    Returns:
        The plan: `print` it, `save` it, or give it to `Pipe(model, plan=plan)`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or no plan fits.

    Example:
        >>> import torch
        >>> layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        >>> found = plan(layers, torch.zeros(16, 8), target=torch.zeros(16, 8), loss_fn=nn.functional.mse_loss,
        ...              devices=["cpu", "cpu"], chunks=4, seconds=0.1, timeout=0)
        >>> sum(found.balance), found.chunks
        (4, 4)
    """
    report = checked_report(progress)
    checked_budget(seconds, iterations)
    options: dict[str, Any] = {"batch": batch, "chunks": chunks, "optimizer": optimizer, "schedules": schedules}
    if mesh is not None and (devices is not None or isinstance(model, Profile)):
        raise ValueError(
            "mesh is for a model that each process measures on its own device: leave devices= out; a plan of a profile "
            "is made once, saved, and loaded by all processes, pipework.Plan.load(path)"
        )
    if isinstance(model, Profile):
        given = {"sample": sample, "target": target, "loss_fn": loss_fn, "keywords": keywords}
        if unused := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"plan got a profile and {unused[0]}=, which only the measurement of a model needs")
        if devices is None:
            kinds = ", ".join(map(repr, model.kinds))
            raise ValueError(
                f"devices is missing: with a profile, name one device or kind of device for each worker; kinds: {kinds}"
            )
        request = make_request(model, devices, memory, **options)  # type: ignore[arg-type]  # which takes their texts
        return plan_request(request, seconds, iterations, report)
    if isinstance(model, str | Path):
        raise TypeError(f"model is {str(model)!r}: wanted layers or a profile, such as Profile.load({str(model)!r})")
    if sample is None:
        raise TypeError("plan got no sample: give the inputs of a mini-batch, plan(model, x, target=y, loss_fn=f)")
    if not isinstance(model, nn.Sequential):
        raise not_sequential(model)
    names = checked_schedules(schedules)
    if target is None and names != ("gpipe",):  # which alone has all outputs before the first backward
        raise ValueError(
            "plan got no target: its schedules compute the loss inside of the pipe, so give target=y, loss_fn=f; for a "
            "loss outside, schedules=['gpipe']"
        )
    measuring: dict[str, Any] = {
        "target": target, "loss_fn": loss_fn, "keywords": keywords, "timeout": timeout, "progress": report,
    }  # fmt: skip
    if mesh is not None:

        def measure(device: torch.device, workers: int) -> Profile:
            present = SampleBatch.of(model, sample, keywords, target, loss_fn).rows
            check_options(workers, len(model), present if batch is None else batch, chunks, optimizer, (), None)
            sizes = micro_batch_sizes(present, workers, None)
            return profile(model, sample, devices=[device], rows=sizes, **measuring)

        return plan_on_ranks(mesh, measure, memory, options, seconds, iterations, report)
    machine = Machine.here()
    places = default_devices(len(model), False, machine) if devices is None else checked_devices(devices, machine)
    whole = SampleBatch.of(model, sample, keywords, target, loss_fn)
    known = {*map(str, places), *map(device_kind, places)}
    rows = whole.rows if batch is None else batch
    check_options(len(places), len(model), rows, chunks, optimizer, known, memory)
    found = profile(model, sample, devices=places, **measuring)
    request = make_request(found, [str(each) for each in places], memory, **options)
    return _measured_and_fitting(request, model, whole, seconds, iterations, timeout, report)


def _measured_and_fitting(
    request: PlanRequest,
    model: nn.Sequential,
    batch: SampleBatch,
    seconds: float | None,
    iterations: int | None,
    timeout: float,
    report: Callable[[str], None],
) -> Plan:
    """A plan whose stages were measured, and fit: a stage does not need just the sum of what its layers need."""
    limits = dict(zip(request.devices, request.limits, strict=True))
    given, tried = request, list[Plan]()
    for _ in range(_TRIES):
        try:
            plans = best_plans(request, seconds, iterations, report, named=_NAMED, within=_WITHIN)
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
