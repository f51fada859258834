"""`pipework.plan`: from a model and a mini-batch, or a profile, to a plan that runs.

A search knows what layers take and hold, each alone. Workers that run at the same time slow each other down (stages of
two CPU workers have been 7 to 19 % slower than alone), and a stage does not need just the sum of what its layers need.
So steps of the best plans are tried, and the stages of the fastest must fit as they are measured.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import pipework
from pipework.assignment.partition import chosen_devices, grouped
from pipework.model.sequential import named_layers
from pipework.planning.measuring.any_model import as_layers
from pipework.planning.measuring.links import device_kind
from pipework.planning.measuring.on_ranks import plan_on_ranks
from pipework.planning.measuring.predict import predict_step
from pipework.planning.measuring.profile import SIZES, checked_report, micro_batch_sizes, profile_of
from pipework.planning.measuring.sample_batch import SampleBatch
from pipework.planning.measuring.stage_copy import now, traceless
from pipework.planning.plan import Plan, WorkerBytes
from pipework.planning.profiles import Profile
from pipework.planning.request import check_options, checked_schedules, make_request
from pipework.planning.search import Budget, best_plans, no_plan_fits
from pipework.runtime.free_memory import free_host_memory
from pipework.runtime.out_of_memory import is_out_of_memory
from pipework.schedule.draw.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from pipework.distributed.mesh import Mesh
    from pipework.model.sequential import Device
    from pipework.planning.request import PlanRequest

_TIMEOUT = 0.2
_NAMED = 5  # schedules with a name that are tried beside the best plan
_SEARCHES = 3  # at most, each with less memory, if the stages that the one before has found do not fit
_TURNS = 3
_PARTS = 3  # of the seconds: to measure, to search, to try
# The first step of a turn allocates and chooses kernels; the second one has been 6 to 13 % slower than those after it.
_WARM_UP = 2
_LEAST_STEPS = 2  # of a turn, that count
_CLEARLY = 0.98  # of the first plan's seconds; less is noise
_SLOWED = 1.25  # of the step by the profile; less is usual
_TIMES = (
    "forward", "backward", "input_gradient", "weight_gradient", "transfer", "skip_transfer", "offload", "reload",
)  # fmt: skip


def plan(
    model: nn.Module | Profile,
    sample: Any = None,
    *,
    target: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    devices: Sequence[Device] | None = None,
    workers: int | None = None,
    memory: float | str | Mapping[str, float | str] | None = None,
    batch: int | None = None,
    chunks: int | Sequence[int] | None = None,
    optimizer: float = 2.0,
    schedules: Sequence[str] | None = None,
    offload: bool | None = None,
    seconds: float | None = 30.0,
    iterations: int | None = None,
    keywords: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    progress: Callable[[str], None] | None = None,
    mesh: Mesh | DeviceMesh | None = None,
) -> Plan:
    """Find the fastest training step that fits, and say how far from the best possible it is.

    The layers are measured with :func:`pipework.planning.profile`, unless `model` is a profile. Then cuts, numbers of
    micro-batches, schedules, recomputation and orders of unequal devices are searched; each is simulated with what was
    measured. Steps of the best plans are then run on copies of the layers, and the fastest is taken.

    Args:
        model: the layers, or any module that `attach` takes, or a profile of either.
        sample: the inputs of a mini-batch; a tuple is spread into positional arguments. Of a module that is no
            `nn.Sequential`, what `attach` takes.
        target: of the loss. A module that computes its loss itself has it in the sample, as 'labels' or under the name
            that is given here. None: only for schedules=['gpipe'], after whose forwards the loss may be
            computed outside.
        loss_fn: as for `Pipe`.
        devices: one for each worker. None: all accelerators, else CPU workers; with a profile they must be given.
        workers: their number; None: one for each of `devices`. The first accelerators, else CPU workers.
        memory: the bytes that each device may hold, or texts such as "24GiB"; one for all, or by device. None: what
            accelerators have. It is not that of a worker: several CPU workers share the CPU's evenly.
        batch: the rows of a mini-batch; None: those of the sample.
        chunks: the number of micro-batches, or several to choose from; None: the planner's choice.
        optimizer: how many numbers it keeps for each trained parameter: 2 for Adam, 0 for plain SGD, and for a
            `HostOptimizer` of accelerators.
        schedules: names that may be chosen; None: all.
        offload: whether activations may go to host memory where that of devices is too small, if the link is known: it
            is measured on accelerators, and `Rates` may have it. None: they may; True: a note says if it is not known.
        seconds: for measuring layers, the search, and trying steps. All layers run a few times, and the best plan some
            steps, however long that takes. Where memory is limited, given or known, there is another search if the
            stages turn out to need more than their layers.
        iterations: candidates to try instead, which gives the same plan for the same profile.
        keywords: keyword arguments of the first layer.
        timeout: seconds to measure each layer with each number of rows, and to try steps, for each stage of a plan, but
            some steps at least; None: 0.2, or less where `seconds` are few. Not with a profile.
        progress: called with a line of text for each step; None: lines are logged to "pipework" (INFO).
        mesh: what `pipework.init()` returned: each worker is a process, with a device of one kind. All of them call
            this with the same model and mini-batch; the first measures the layers, all measure their links, and all get
            the same plan. Steps are not measured. None: workers are threads.

    Returns:
        The plan: `print` it, `save` it, or give it to `Pipe(model, plan=plan)` or `attach(model, sample, plan=plan)`.

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
    report, budget = checked_report(progress), Budget.of(seconds, iterations)
    end = time.perf_counter() + budget.seconds
    options: dict[str, Any] = {"batch": batch, "chunks": chunks, "optimizer": optimizer, "schedules": schedules}
    options["offload"] = offload
    measuring: dict[str, Any] = {
        "sample": sample, "target": target, "loss_fn": loss_fn, "keywords": keywords, "timeout": timeout,
    }  # fmt: skip
    if isinstance(model, Profile):
        measuring |= {"mesh": mesh, "workers": workers}
        if unused := [name for name, value in measuring.items() if value is not None]:
            raise ValueError(f"plan got a profile and {unused[0]}=, which only the measurement of a model needs")
        # Devices are texts here, which `make_request` checks.
        return best_plans(make_request(model, devices, memory, **options), budget, report)[0]  # type: ignore[arg-type]
    layers, given = as_layers(model, sample, keywords, target, loss_fn)
    names = checked_schedules(schedules)
    if given["target"] is None and names != ("gpipe",):  # which alone has all outputs before the first backward
        raise ValueError(
            "plan got no target: its schedules compute the loss inside of the pipe, so give target=y, loss_fn=f; for a "
            "loss outside, schedules=['gpipe']"
        )
    if timeout is None:
        timeout = min(_TIMEOUT, budget.seconds / _PARTS / (SIZES * len(layers) or 1))

    def checked_batch(workers: int, names: Collection[str], memory: Any) -> SampleBatch:
        found = SampleBatch.of(layers, **given)
        if found.made is not None:
            if options["chunks"] not in (None, found.made):
                raise ValueError(
                    f"chunks is {chunks!r}, and the sample has {found.made} micro-batches: leave chunks= out"
                )
            options["chunks"] = found.made
        rows = found.rows if batch is None else batch
        check_options(workers, len(layers), rows, options["chunks"], optimizer, names, memory, offload)
        return found

    if mesh is not None:
        if devices is not None or workers is not None:
            raise ValueError("with mesh=, each process measures its own device: leave devices= and workers= out")

        def measure(device: torch.device, workers: int) -> Profile:
            whole = checked_batch(workers, (), None)
            sizes = micro_batch_sizes(whole.rows, workers, None)
            return profile_of(layers, whole, [device], timeout, report, rows=sizes)

        return plan_on_ranks(mesh, measure, memory, options, budget, report)
    places = chosen_devices(devices, len(layers), workers)
    whole = checked_batch(len(places), {*map(str, places), *map(device_kind, places)}, memory)
    measured = profile_of(layers, whole, places, timeout, report)
    request = make_request(measured, [str(each) for each in places], memory, **options)
    request = replace(request, host_memory=free_host_memory())
    search = budget._replace(seconds=max(budget.seconds / _PARTS, (end - time.perf_counter()) * (1 - 1 / _PARTS)))
    return plan_that_fits(request, layers, whole, search, timeout, report, end)


def plan_that_fits(
    request: PlanRequest,
    model: nn.Sequential,
    batch: SampleBatch,
    budget: Budget,
    timeout: float,
    report: Callable[[str], None],
    end: float = inf,
) -> Plan:
    """The best plan whose stages fit as they were measured.

    Args:
        request: what is to be planned, with a profile of this machine.
        model: its layers.
        batch: the mini-batch.
        budget: of each search.
        timeout: seconds to measure each stage.
        report: called with a line of text for each step.
        end: see `by_speed`.

    Raises:
        ValueError: no plan fits.
    """
    given, limits = request, dict(zip(request.devices, request.limits, strict=True))
    tried: list[Plan] = []
    once = min(request.limits) == inf or batch.rows != request.batch
    for _ in range(1 if once else _SEARCHES):
        try:
            plans = best_plans(request, budget, report, _NAMED)
        except ValueError:
            if not tried:
                raise
            break  # nothing fits what the last plan has shown to be left for layers
        if batch.rows != request.batch:
            return plans[0]  # for a mini-batch that is not here
        over = inf
        for plan in by_speed(plans, model, batch, timeout, report, end):
            measured = measured_plan(plan, limits, model, batch)
            lacking = [
                held.total / before.total
                for held, before in zip(measured.workers, plan.workers, strict=True)
                if not held.fits
            ]
            if not lacking:
                return measured
            tried.append(measured)
            over = min(over, max(lacking))
        # What does not fit was planned to be smaller: so much that this plan, and those like it, are excluded.
        report(f"measured as a whole, a worker needs {over:.3g} times what its layers need: planned again with less")
        request = replace(request, limits=tuple(limits[device] / over for device in request.devices))
    best = min(tried, key=lambda plan: max(held.total / held.limit for held in plan.workers))
    raise no_plan_fits(given, best.devices, best.workers)


# ---- which plan is fastest -------------------------------------------------------------------------------------------


def by_speed(
    plans: Sequence[Plan],
    module: nn.Sequential,
    batch: SampleBatch,
    timeout: float,
    report: Callable[[str], None],
    end: float = inf,
) -> list[Plan]:
    """The plans with the fastest steps first, whose simulated steps take as long as the median of their steps.

    Plans take turns, so that what else runs on the machine slows all of them down.

    Args:
        plans: for this machine; the first one is preferred if others are not clearly faster.
        module: their layers.
        batch: the mini-batch.
        timeout: seconds for each stage of a plan; there are some steps of each plan at least.
        report: called with a line of text for each plan.
        end: when no plan's turn begins any more, but the first one's first.

    Returns:
        If there is no target, or too little memory, steps cannot be tried: then the first plan as it is.
    """
    if batch.target is None:
        return [plans[0]]  # the caller computes the loss, and this does not know how
    steps: dict[int, list[float]] = {number: [] for number in range(len(plans))}
    report(f"steps of {counted(len(plans), 'plan')} are tried")
    for _ in range(_TURNS):
        for number in list(steps):
            plan = plans[number]
            if any(steps.values()) and time.perf_counter() > end:
                break
            try:
                steps[number] += run_steps(plan, module, batch, timeout * len(plan.balance) / _TURNS)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                del steps[number]
    if not steps:
        report("no memory for steps of the plan beside the model: its times are those of the profile")
        return [plans[0]]
    medians = {number: median(each) for number, each in steps.items() if each}
    for number, step in medians.items():
        name = f"{plans[number].schedule.name}, {counted(plans[number].chunks, 'micro-batch')}"
        report(f"{name}: {step:.3g} s, median of {counted(len(steps[number]), 'step')}")
    fastest = sorted(medians, key=lambda number: medians[number] * (1 if number else _CLEARLY))
    return [_with_step(plans[number], medians[number]) for number in fastest]


def run_steps(plan: Plan, module: nn.Sequential, batch: SampleBatch, seconds: float) -> list[float]:
    """Trains a copy of the layers as a plan says, without an optimizer.

    Returns:
        The seconds of each step after the first ones, from its call to its end on all devices.
    """
    devices = [torch.device(device) for device in dict.fromkeys(plan.devices)]

    def clock() -> float:
        return max(map(now, devices))

    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(traceless(device))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the pipe that is made of the plan will warn
        layers = copy.deepcopy(module)
        layers.zero_grad(set_to_none=True)
        if not any(layer.training for layer in layers.modules()):
            layers.train()
        # Weights change no time, and rows need not say those of micro-batches that are not cut along rows.
        weight = None if batch.split is None and batch.made is None else lambda target: 1.0
        pipe = pipework.Pipe(layers, plan=plan, loss_fn=batch.loss_fn, loss_weight=weight, split=batch.split)
        times: list[float] = []
        end = clock() + seconds
        while len(times) < _WARM_UP + _LEAST_STEPS or clock() < end:
            begin = clock()
            pipe(*batch.inputs, target=batch.target, **batch.keywords)
            times.append(clock() - begin)
    return times[_WARM_UP:]


def _with_step(plan: Plan, step: float) -> Plan:
    """The plan with times of its actions that make the simulated step as long as a measured one."""
    factor = step / (plan.seconds or step)
    times = {name: tuple(each * factor for each in getattr(plan.costs, name)) for name in _TIMES}
    notes = plan.notes
    if factor > _SLOWED:
        notes += (
            f"its step takes {factor:.2g} times what it would with layers as fast as alone: workers slow each other "
            "down, for example if they share cores, memory or a link",
        )
    return replace(plan, costs=replace(plan.costs, **times), notes=notes)


# ---- what its stages hold --------------------------------------------------------------------------------------------


def measured_plan(plan: Plan, limits: Mapping[str, float], module: nn.Sequential, batch: SampleBatch) -> Plan:
    """The plan with the measured bytes of its stages, each as a whole.

    Args:
        plan: for this machine.
        limits: the bytes that a worker on each device may hold.
        module: its layers.
        batch: the mini-batch.
    """
    found = predict_step(
        grouped(named_layers(module), plan.balance),
        [torch.device(plan.devices[worker]) for worker in plan.schedule.placement],
        plan.schedule,
        batch.micro_batches(-(-plan.batch // plan.chunks)),
        batch.tuples,
        optimizer=plan.optimizer,
        timeout=0.0,
        progress=lambda line: None,
        known={name: getattr(plan.costs, name) for name in _TIMES},
    )
    # Workers of one device share what it needs beside their own.
    own: Counter[str] = Counter()
    for device, size in zip(plan.devices, found.worker_bytes, strict=True):
        own[device] += size
    workers = []
    per_worker = zip(plan.devices, found.worker_bytes, found.simulation.peak_memory, found.host_bytes, strict=True)
    for device, size, peak, host in per_worker:
        rest = max(0.0, found.device_bytes[torch.device(device)] - own[device]) / plan.devices.count(device)
        workers.append(WorkerBytes(size - peak, peak, rest, limits[device], host))
    return replace(plan, costs=found.costs, workers=tuple(workers))
