"""Chooses the stages of a pipe, the workers that hold them, their devices, and the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from pipework.balance.checks import checked_balance, not_sequential, too_few_devices
from pipework.planning.devices import Machine, checked_devices, default_devices
from pipework.planning.partition import Partitioning, choose_partitioning, is_placed, log_choice
from pipework.runtime.program import Program
from pipework.schedule import Schedule, build, restricted, schedule_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pipework.model.with_device import Device


@dataclass(frozen=True)
class Plan:
    """A schedule for any number of micro-batches, and the layers, workers and devices of its stages.

    Attributes:
        source: the schedule's name, or the user's own schedule.
        partitioning: layers and device of each stage.
        placement: the worker of each stage.
    """

    source: str | Schedule
    partitioning: Partitioning
    placement: tuple[int, ...]

    @property
    def workers(self) -> int:
        """The number of workers."""
        return max(self.placement, default=-1) + 1

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each worker."""
        return tuple(self.partitioning.devices[self.placement.index(worker)] for worker in range(self.workers))

    def schedule(self, micro_batches: int) -> Schedule:
        """The order of all actions, without recomputation.

        Raises:
            ValueError: the user's own schedule has fewer micro-batches.
        """
        if isinstance(self.source, Schedule):
            return restricted(self.source, micro_batches)
        stages_per_worker = len(self.placement) // max(1, self.workers)
        return build(self.source, workers=self.workers, chunks=micro_batches, stages_per_worker=stages_per_worker)


def make_plan(
    module: nn.Sequential,
    schedule: str | Schedule,
    chunks: int,
    balance: Sequence[int] | None,
    devices: Sequence[Device] | None,
) -> Plan:
    """Finds stages, workers and devices that fit the schedule and the user's arguments.

    With one stage per worker there is one device for each partition (see `choose_partitioning`). With several, there is
    one device for each worker, and the schedule places the worker's stages.

    Raises:
        TypeError: the module is not an `nn.Sequential`, or the schedule is neither a name nor a `Schedule`.
        ValueError: the numbers of layers, partitions, devices, stages and chunks do not fit together; the message says
            which numbers fit.
        IndexError: fewer devices than workers.
    """
    if not isinstance(module, nn.Sequential):
        raise not_sequential(module)
    if not isinstance(schedule, str | Schedule):
        raise TypeError(f"schedule is {schedule!r}: wanted a name such as '1f1b', or a Schedule")
    if isinstance(schedule, str):
        Program.of(build(schedule, workers=2, chunks=2))  # refuses a schedule that cannot be run
        known = schedule_spec(schedule)
        if not known.several and known.stages_per_worker == 1:
            partitioning = choose_partitioning(module, balance, devices)
            return Plan(schedule, partitioning, tuple(range(len(partitioning.balance))))
    machine = Machine.here()
    counts = None if balance is None else checked_balance(balance, len(module))
    places = None if devices is None else checked_devices(devices, machine)
    if isinstance(schedule, Schedule):
        _refuse_unfit(schedule, chunks)
        return _placed(module, schedule, schedule.placement, counts, places, machine)
    return _several_stages(module, schedule, counts, places, machine)


def _refuse_unfit(schedule: Schedule, chunks: int) -> None:
    """Raises a ValueError if the user's own schedule cannot be run, or not with so many micro-batches."""
    Program.of(schedule)
    again = next((action for order in schedule.orders for action in order if action.kind == "R"), None)
    if again is not None:
        raise ValueError(f"the schedule recomputes by itself ({again}): leave R out, and give checkpoint=... instead")
    if chunks != schedule.micro_batches:
        raise ValueError(
            f"chunks is {chunks}, but the schedule {schedule.name!r} is for {schedule.micro_batches} micro-batches: "
            f"give chunks={schedule.micro_batches}, or make the schedule for {chunks}"
        )


def _several_stages(
    module: nn.Sequential,
    schedule: str,
    balance: Sequence[int] | None,
    devices: Sequence[torch.device] | None,
    machine: Machine,
) -> Plan:
    """The plan for a schedule by name whose workers hold several stages each."""
    known = schedule_spec(schedule)
    per_worker = known.stages_per_worker
    if balance is None and devices is None:
        if is_placed(module):
            partitioning = choose_partitioning(module, None, None, machine=machine)
            return _as_it_lies(schedule, partitioning, per_worker)
        workers = len(default_devices(max(1, len(module) // per_worker), False, machine))
        plan = _placed(module, schedule, known.placement(workers, per_worker), None, None, machine)
        log_choice(plan.partitioning, machine)
        return plan
    workers = len(devices) if devices is not None else _workers(len(balance or ()), per_worker)
    if not workers:
        raise IndexError(
            f"too few devices to hold given partitions (devices: 0, layers: {len(module)}): give one for each worker"
        )
    if balance is not None:
        if len(balance) % workers:
            raise ValueError(
                f"balance has {len(balance)} partitions for {workers} workers: with schedule {schedule!r} each worker "
                "holds the same number of them, so give a multiple of the number of devices"
            )
        per_worker = len(balance) // workers
    return _placed(module, schedule, known.placement(workers, per_worker), balance, devices, machine)


def _workers(stages: int, per_worker: int) -> int:
    """The smallest number of workers of which none holds more stages than `per_worker`."""
    return max(1, -(-stages // per_worker))


def _as_it_lies(schedule: str, partitioning: Partitioning, per_worker: int) -> Plan:
    """The plan for layers that lie on devices already; these must repeat in the order of the schedule's workers."""
    stages = len(partitioning.balance)
    kinds = len(set(partitioning.devices))
    # Several CPU workers have one device, so the devices do not show the number of workers.
    workers = kinds if kinds > 1 else _workers(stages, per_worker)
    placement = schedule_spec(schedule).placement(workers, max(1, stages // workers))
    plan = Plan(schedule, partitioning, placement)
    if len(placement) != stages or any(
        plan.devices[worker] != device for worker, device in zip(placement, partitioning.devices, strict=True)
    ):
        where = ", ".join(map(str, partitioning.devices))
        raise ValueError(
            f"the layers form {stages} partitions on {where}, but with schedule {schedule!r} partitions must go round "
            "the devices again and again: move the layers, or give balance and devices"
        )
    return plan


def _placed(
    module: nn.Sequential,
    source: str | Schedule,
    placement: tuple[int, ...],
    balance: Sequence[int] | None,
    devices: Sequence[torch.device] | None,
    machine: Machine,
) -> Plan:
    """The plan for a given placement."""
    if not len(module):
        return Plan(source, choose_partitioning(module, None, None, machine=machine), ())
    workers = max(placement, default=-1) + 1
    places = default_devices(workers, True, machine) if devices is None else devices
    if len(places) < workers:
        raise too_few_devices(len(places), workers, "workers")
    stages = len(placement)
    if balance is not None and len(balance) != stages:
        raise ValueError(f"the schedule has {stages} stages, and balance has {len(balance)} entries: give one for each")
    if len(module) < stages:
        most = len(module) // (stages // workers)
        fewer = (
            f"use at most {most} worker{'s' if most > 1 else ''}, or cut layers finer" if most else "cut layers finer"
        )
        raise ValueError(
            f"the schedule has {stages} stages, and there are {len(module)} layers: each needs one; {fewer}"
        )
    on_stages = [places[worker] for worker in placement]
    return Plan(source, choose_partitioning(module, balance, on_stages, machine=machine), placement)
