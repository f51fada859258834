"""Chooses the stages of a pipe, the workers that hold them, their devices, and the schedule."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from pipework.assignment.partition import (
    Machine,
    Partitioning,
    check_sequential,
    checked_balance,
    checked_devices,
    choose_partitioning,
    default_devices,
    is_placed,
    too_few_devices,
)
from pipework.model.checkpoint import AS_SCHEDULED, checkpointed_micro_batches
from pipework.runtime.program import Program
from pipework.schedule import (
    Schedule,
    ScheduleSpec,
    build,
    restricted,
    schedule_spec,
    with_offload,
    with_recompute,
    without_recompute,
)
from pipework.schedule.edges import offloaded, recomputed
from pipework.tracebacks import warn_caller

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pipework.model.sequential import Device


@dataclass(frozen=True)
class Assignment:
    """A schedule for any number of micro-batches, and the layers, workers and devices of its stages.

    Attributes:
        source: the schedule's name, or the user's own spec or schedule.
        partitioning: layers and device of each stage.
        placement: the worker of each stage.
    """

    source: str | ScheduleSpec | Schedule
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
            ValueError: the user's own schedule has fewer micro-batches, or the generator of the user's own spec makes
                another one than it is asked for.
        """
        if isinstance(self.source, Schedule):
            return without_recompute(self._own(micro_batches))
        stages_per_worker = len(self.placement) // max(1, self.workers)
        made = build(self.source, workers=self.workers, chunks=micro_batches, stages_per_worker=stages_per_worker)
        if (made.placement, made.micro_batches) != (self.placement, micro_batches):
            raise ValueError(
                f"{self.source!r} was asked for {micro_batches} micro-batches with the stages on workers "
                f"{self.placement}, and made {made!r} with {made.placement}: correct its generator, or its placement"
            )
        return made

    @property
    def recomputes(self) -> bool:
        """Whether the user's own schedule says what is recomputed."""
        return isinstance(self.source, Schedule) and bool(recomputed(self.source))

    def complete(self, micro_batches: int, checkpoint: str, keep: int | None, *, loss_outside: bool) -> Schedule:
        """The order of all actions, with recomputation and copies to the host, unless the user's own schedule has them.

        Args:
            micro_batches: their number.
            checkpoint: see `checkpointed_micro_batches`, or `AS_SCHEDULED`.
            keep: see `with_offload`; None: nothing is added.
            loss_outside: see `with_recompute` and `with_offload`.

        Raises:
            ValueError: see `schedule`.
        """
        if checkpoint == AS_SCHEDULED:
            made = self._own(micro_batches)
        else:
            count = checkpointed_micro_batches(checkpoint, micro_batches)
            made = with_recompute(self.schedule(micro_batches), count, loss_outside=loss_outside)
        return made if keep is None else with_offload(made, keep=keep, loss_outside=loss_outside)

    def loss_may_be_outside(self, micro_batches: int) -> bool:
        """Whether all forwards come before all backwards."""
        return Program.of(self.schedule(micro_batches)).loss_may_be_outside

    def _own(self, micro_batches: int) -> Schedule:
        """The user's own schedule for so many micro-batches, as it is."""
        assert isinstance(self.source, Schedule)
        if micro_batches > self.source.micro_batches:
            raise ValueError(
                f"the mini-batch has {micro_batches} micro-batches, and the schedule {self.source.name!r} is made "
                f"for {self.source.micro_batches}: give at most as many, or a pipe the schedule's name, if it has "
                "one, which makes it for any number"
            )
        return restricted(self.source, micro_batches)


def warn_of_offload(schedule: Schedule) -> None:
    """Says so if `offload=` moves nothing in the schedule of a pipe."""
    if not offloaded(schedule):
        warn_caller(
            f"offload= moves nothing: no worker of {schedule.title} would hold less. Give each device several "
            "partitions (schedule='interleaved-1f1b' and a longer balance), or leave offload= out"
        )


def assign(
    module: nn.Sequential,
    schedule: str | ScheduleSpec | Schedule,
    chunks: int,
    balance: Sequence[int] | None,
    devices: Sequence[Device] | None,
) -> Assignment:
    """Finds stages, workers and devices that fit the schedule and the user's arguments.

    With one stage per worker there is one device for each partition (see `choose_partitioning`). With several, there is
    one device for each worker, and the schedule places the worker's stages.

    Raises:
        TypeError: the module is not an `nn.Sequential`, or the schedule is neither a name nor a `ScheduleSpec` nor a
            `Schedule`.
        ValueError: the numbers of layers, partitions, devices, stages and chunks do not fit together; the message says
            which numbers fit.
        IndexError: fewer devices than workers.
    """
    check_sequential(module)
    if not isinstance(schedule, str | ScheduleSpec | Schedule):
        raise TypeError(f"schedule is {schedule!r}: wanted a name such as '1f1b', a ScheduleSpec or a Schedule")
    machine = Machine.here()
    counts = None if balance is None else checked_balance(balance, len(module))
    places = None if devices is None else checked_devices(devices, machine)
    if isinstance(schedule, Schedule):
        Program.of(schedule)
        if chunks != schedule.micro_batches:
            raise ValueError(
                f"chunks is {chunks}, but the schedule {schedule.name!r} is for {schedule.micro_batches} micro-batches"
                f": give chunks={schedule.micro_batches}, or make the schedule for {chunks}"
            )
        return _placed(module, schedule, schedule.placement, counts, places, machine)
    spec = _spec(schedule)
    if not spec.any_stages_per_worker and spec.stages_per_worker == 1:
        partitioning = choose_partitioning(module, counts, places, machine=machine)
        assignment = Assignment(schedule, partitioning, tuple(range(len(partitioning.balance))))
    else:
        placement = spec.placement(*_workers_and_stages(module, schedule, spec, counts, places, machine))
        assignment = _placed(module, schedule, placement, counts, places, machine)
    if balance is None and devices is None and not is_placed(module):
        chosen = assignment.partitioning
        logging.getLogger("pipework").info(
            "balance %s on %s: the accelerators that are visible, or else CPU workers; choose with balance= and "
            "devices=",
            list(chosen.balance),
            list(map(str, chosen.devices)),
        )
    if isinstance(schedule, ScheduleSpec) and assignment.workers:
        Program.of(assignment.schedule(chunks))
    return assignment


def _spec(schedule: str | ScheduleSpec) -> ScheduleSpec:
    """The spec of a schedule by name. Raises a ValueError if it cannot be run; it tries a small one."""
    if isinstance(schedule, ScheduleSpec):
        return schedule  # whose generator need not make a small one
    try:
        spec = schedule_spec(schedule)
    except ValueError as error:
        raise ValueError(f"{error}; for one of your own, give the ScheduleSpec or Schedule itself") from None
    Program.of(build(schedule, workers=2, chunks=2))
    return spec


def _workers_and_stages(
    module: nn.Sequential,
    schedule: str | ScheduleSpec,
    spec: ScheduleSpec,
    balance: Sequence[int] | None,
    devices: Sequence[torch.device] | None,
    machine: Machine,
) -> tuple[int, int]:
    """The number of workers, and of the stages of each, for a schedule whose workers hold several stages."""
    per_worker = spec.stages_per_worker
    if devices is not None:
        workers = len(devices)
    elif balance is not None:
        workers = max(1, -(-len(balance) // per_worker))
    elif is_placed(module):
        raise ValueError(
            f"the layers lie on several devices or are wrapped in WithDevice, and with schedule {schedule!r} each "
            "worker holds several stages: give balance= and devices=, which say where layers go"
        )
    else:
        workers = len(default_devices(max(1, len(module) // per_worker), False, machine))
    if not workers:
        raise too_few_devices(0, 1, "workers")
    if balance is None:
        return workers, per_worker
    if len(balance) % workers:
        raise ValueError(
            f"balance has {len(balance)} partitions for {workers} workers: with schedule {schedule!r} each worker "
            "holds the same number of them, so give a multiple of the number of devices"
        )
    return workers, len(balance) // workers


def _placed(
    module: nn.Sequential,
    source: str | ScheduleSpec | Schedule,
    placement: tuple[int, ...],
    balance: Sequence[int] | None,
    devices: Sequence[torch.device] | None,
    machine: Machine,
) -> Assignment:
    """The assignment for a given placement."""
    if not len(module):
        return Assignment(source, Partitioning((), ()), ())
    stages, workers = len(placement), max(placement, default=-1) + 1
    places = default_devices(workers, True, machine) if devices is None else devices
    if len(places) < workers:
        raise too_few_devices(len(places), workers, "workers")
    if balance is not None and len(balance) != stages:
        raise ValueError(f"the schedule has {stages} stages, and balance has {len(balance)} entries: give one for each")
    if len(module) < stages:
        raise ValueError(
            f"the schedule has {stages} stages, and there are {len(module)} layers: each needs one; use fewer workers, "
            "or cut layers finer"
        )
    on_stages = [places[worker] for worker in placement]
    return Assignment(source, choose_partitioning(module, balance, on_stages, machine=machine), placement)
