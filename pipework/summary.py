"""The text of `print(pipe)`: a table of the partitions, the schedule and its predicted bubble."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pipework.schedule import simulate
from pipework.schedule.draw.units import aligned, counted
from pipework.schedule.edges import offloaded
from pipework.values.dtensor import is_over_processes, local_part

if TYPE_CHECKING:
    from pipework.pipe import Pipe


def table(pipe: Pipe) -> str:
    """The partitions with their devices and sizes, then schedule, chunks, checkpoint mode, graphs and predicted bubble.

    Of a pipe that is attached to a model, a partition has units of the model instead of layers. For a partition in
    another process, only its rank is known, and its number of layers or its units. If layers are sharded, a column
    says how much of them is in this process; if activations go to host memory, a column says those of how many
    micro-batches. The bubble is the idle share of the workers' time, as in the plan of the pipe; without a plan, if all
    partitions take equally long and a backward takes twice as long as a forward.
    """
    attached = pipe._attached
    of_model = "" if attached is None else f" of {type(attached.model).__name__}"
    what, count = ("layer", sum(pipe.balance)) if attached is None else ("unit", len(attached.units))
    heading = f"Pipe{of_model}: {counted(count, what)} in {counted(len(pipe.balance), 'partition')}"
    if not pipe.balance:
        return heading
    if len(pipe.stages) < len(pipe.balance):
        heading += f"; this process has {counted(len(pipe.stages), 'partition')}"
    schedule = pipe.schedule()
    here = dict(zip(pipe.stages, pipe.partitions, strict=True))
    sharded = any(is_over_processes(parameter) for partition in here.values() for parameter in partition.parameters())
    away = Counter(stage for stage, _ in offloaded(schedule))
    offloads = bool(away) or pipe._executor.settings.keep is not None
    more = [*(["bytes here"] if sharded else []), *(["offloads"] if offloads else [])]
    rows = [("partition", "device", f"{what}s", "parameters", "bytes", *more)]
    for number, layers in enumerate(pipe.balance):
        worker = schedule.placement[number]
        device = str(pipe.devices[worker])
        rank = pipe._backend.rank_of(worker)
        if rank is not None:
            device = f"{device}, rank {rank}" if number in here else f"rank {rank}"
        elif schedule.workers != schedule.stages:
            device = f"{device} (worker {worker})"
        if number not in here:
            elsewhere = f"({layers})" if attached is None else attached.spans[number].ends
            rows.append((str(number), device, elsewhere, *(["-"] * (len(rows[0]) - 3))))
            continue
        moved = [f"{away[number]} of {schedule.micro_batches}"] if offloads else []
        parameters, names = list(here[number].parameters()), list(here[number]._modules)
        layers_here = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
        if attached is not None:
            layers_here = attached.spans[number].ends
        sizes = [sum(each.nbytes for each in parameters)]
        sizes += [sum(local_part(each).nbytes for each in parameters)] if sharded else []
        count = sum(each.numel() for each in parameters)
        rows.append((str(number), device, layers_here, f"{count:,}", *map(readable_bytes, sizes), *moved))
    how = pipe._executor.settings.graph_names
    graphs = f"graphs {', '.join(sorted(how - {'on'}) or how)}, " if how else ""
    plan = pipe._executor.settings.plan
    bubble = f"{simulate(schedule).bubble:.1%} if all partitions take equally long"
    if plan is not None:
        bubble = f"{plan.simulation.bubble:.1%} by the plan"
    summary = (
        f"schedule {schedule.name}, {counted(pipe.chunks, 'chunk')}, checkpoint {pipe.checkpoint!r}, "
        f"{graphs}bubble {bubble}"
    )
    return "\n".join([heading, *aligned(rows, left={1, 2}), summary])


def readable_bytes(size: float) -> str:
    """A size in the largest unit in which it is at least 1.

    Example:
        >>> readable_bytes(1536), readable_bytes(3)
        ('1.5 KiB', '3 B')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
