"""Pipes that run, but not as they were meant: nothing happens at the same time, or what was asked for is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework import torch_private
from pipework.assignment.partition import is_placed
from pipework.schedule import Schedule
from pipework.schedule.draw.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from pipework.assignment.assignment import Assignment
    from pipework.model.sequential import Device


def doubts_about(
    module: nn.Sequential,
    assignment: Assignment,
    chunks: int,
    balance: Sequence[int] | None,
    devices: Sequence[Device] | None,
) -> list[str]:
    """What is probably not meant in a pipe: nothing is pipelined, devices stay idle, or a compilation is not used.

    Args:
        module: the layers.
        assignment: made of them.
        chunks: the number of micro-batches.
        balance: as it was given.
        devices: as they were given; those of processes are given, too.

    Example:
        >>> from torch import nn
        >>> from pipework.assignment.assignment import assign
        >>> module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> doubts_about(module, assign(module, "gpipe", 1, None, ["cpu"]), 1, None, ["cpu"])
        []
    """
    doubts = []
    if assignment.workers > 1 and chunks == 1:
        doubts.append(
            f"chunks is 1, so {assignment.workers} workers wait for each other and nothing is pipelined: give Pipe "
            f"chunks={4 * assignment.workers} or so, the number of micro-batches that a mini-batch is split into"
        )
    if assignment.workers == 1 and balance is None:
        doubts += _one_worker(module, assignment, devices)
    if len(module) > 1 and devices is not None and len(devices) > assignment.workers:
        idle = ", ".join(f"devices[{index}] ({devices[index]!r})" for index in range(assignment.workers, len(devices)))
        doubts.append(
            f"{len(devices)} devices for {counted(assignment.workers, 'worker')}: {idle} will be idle. Give as many "
            "devices as there are workers, or cut the layers into more partitions"
        )
    if torch_private.is_compiled(module):
        doubts.append(
            f"{type(module).__name__}.compile() was called before the pipe was made, which calls the layers one by one "
            "and never the module itself, so they are not compiled: compile each of them instead, "
            "for layer in module: layer.compile()"
        )
    return doubts


def _one_worker(module: nn.Sequential, assignment: Assignment, devices: Sequence[Device] | None) -> list[str]:
    """Why there is one worker only, unless that was asked for."""
    layers, stages = len(module), len(assignment.placement)
    if layers == 1 and (devices is None or len(devices) > 1):
        return [
            f"the nn.Sequential has one layer ({type(module[0]).__name__}), so one worker does everything and nothing "
            "is pipelined: a pipe cuts between the layers of the nn.Sequential, not within one of them. Give it the "
            "layers of the model, such as nn.Sequential(model.embed, *model.blocks, model.head); for one worker on "
            "purpose give balance=[1]"
        ]
    if layers == 1 or devices is not None or isinstance(assignment.source, Schedule):
        return []
    if stages > 1:
        return [
            f"{layers} layers are too few for two workers with {stages} stages each, so one worker has all of them "
            f"and nothing is pipelined: give the nn.Sequential at least {2 * stages} layers, choose a schedule of one "
            "stage per worker, such as '1f1b', or give devices=[\"cpu\"] for one worker on purpose"
        ]
    if is_placed(module):
        return []
    (device,) = assignment.devices
    return [
        f"only one device was found ({device}), so one worker has all {layers} layers and nothing is pipelined: "
        'give devices=["cpu", "cpu"] for two workers on the CPU, make more accelerators visible, or give '
        f"balance=[{layers}] for one worker on purpose"
    ]
