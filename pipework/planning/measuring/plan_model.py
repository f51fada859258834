"""`pipework.plan`: from a model and a mini-batch, or a profile, to a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework.assignment.balance import not_sequential
from pipework.assignment.devices import Machine, checked_devices, default_devices
from pipework.planning.measuring.links import device_kind
from pipework.planning.measuring.on_ranks import plan_on_ranks
from pipework.planning.measuring.plan_that_fits import plan_that_fits
from pipework.planning.measuring.profile import checked_report, micro_batch_sizes, profile
from pipework.planning.measuring.sample_batch import SampleBatch
from pipework.planning.plan import Plan
from pipework.planning.plan_profile import best_plans
from pipework.planning.profiles import Profile
from pipework.planning.request import check_options, checked_schedules, make_request
from pipework.planning.search import checked_budget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from pipework.distributed.mesh import Mesh
    from pipework.model.sequential import Device

_TIMEOUT = 0.2


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
    timeout: float | None = None,
    progress: Callable[[str], None] | None = None,
    mesh: Mesh | DeviceMesh | None = None,
) -> Plan:
    """Find the fastest training step that fits, and say how far from the best possible it is.

    The layers are measured with :func:`pipework.planning.profile`, unless `model` is a profile. Then cuts, numbers of
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
        seconds: to search. Measuring layers before, and trying steps after it, take their time beside that. Where
            memory is limited, given or known, a part is kept for plans whose stages turn out to need more than their
            layers.
        iterations: candidates to try instead, which gives the same plan for the same profile.
        keywords: keyword arguments of the first layer.
        timeout: seconds to measure each layer with each number of rows, and to try steps, for each stage of a plan, but
            some steps at least; None: 0.2. Not with a profile.
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
    budget = checked_budget(seconds, iterations)
    options: dict[str, Any] = {"batch": batch, "chunks": chunks, "optimizer": optimizer, "schedules": schedules}
    measuring: dict[str, Any] = {
        "sample": sample, "target": target, "loss_fn": loss_fn, "keywords": keywords, "timeout": timeout,
    }  # fmt: skip
    if mesh is not None and (isinstance(model, Profile) or devices is not None):
        raise ValueError(
            "mesh is for a model that each process measures on its own device: leave devices= out; a plan of a profile "
            "is made once, saved, and loaded by all processes, pipework.Plan.load(path)"
        )
    if isinstance(model, Profile):
        if unused := [name for name, value in measuring.items() if value is not None]:
            raise ValueError(f"plan got a profile and {unused[0]}=, which only the measurement of a model needs")
        if devices is None:
            kinds = ", ".join(map(repr, model.kinds))
            raise ValueError(
                f"devices is missing: with a profile, name one device or kind of device for each worker; kinds: {kinds}"
            )
        # Devices are texts here, which `make_request` checks.
        return best_plans(make_request(model, devices, memory, **options), budget, report)[0]  # type: ignore[arg-type]
    _check(model, sample, schedules, target)
    measuring |= {"timeout": _TIMEOUT if timeout is None else timeout, "progress": report}
    if mesh is not None:

        def measure(device: torch.device, workers: int) -> Profile:
            present = SampleBatch.of(model, sample, keywords, target, loss_fn).rows
            check_options(workers, len(model), present if batch is None else batch, chunks, optimizer, (), None)
            sizes = micro_batch_sizes(present, workers, None)
            return profile(model, devices=[device], rows=sizes, **measuring)

        return plan_on_ranks(mesh, measure, memory, options, budget, report)
    machine = Machine.here()
    places = default_devices(len(model), False, machine) if devices is None else checked_devices(devices, machine)
    whole = SampleBatch.of(model, sample, keywords, target, loss_fn)
    known = {*map(str, places), *map(device_kind, places)}
    rows = whole.rows if batch is None else batch
    check_options(len(places), len(model), rows, chunks, optimizer, known, memory)
    found = profile(model, devices=places, **measuring)
    request = make_request(found, [str(each) for each in places], memory, **options)
    return plan_that_fits(request, model, whole, budget, measuring["timeout"], report)


def _check(model: object, sample: object, schedules: Sequence[str] | None, target: object) -> None:
    """Raises an error for what cannot be measured."""
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
