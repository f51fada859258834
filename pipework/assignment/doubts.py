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
    doubts, layers, workers = [], len(module), assignment.workers
    given = 0 if devices is None else len(devices)
    if workers > 1 and chunks == 1:
        doubts.append(
            f"chunks is 1, so {workers} workers wait for each other and nothing is pipelined: give Pipe "
            f"chunks={4 * workers} or so, the number of micro-batches that a mini-batch is split into"
        )
    wanted = balance is not None or given == 1 or isinstance(assignment.source, Schedule)
    if workers == 1 and not wanted and (layers == 1 or not (given or is_placed(module))):
        doubts.append(
            f"one worker has all that the nn.Sequential has, {counted(layers, 'layer')}, and nothing is pipelined: "
            "give it the layers of the model, such as nn.Sequential(model.embed, *model.blocks, model.head), and "
            f'several devices, such as devices=["cpu", "cpu"]; for one worker on purpose give balance=[{layers}]'
        )
    if layers > 1 and given > workers and devices is not None:
        idle = ", ".join(f"devices[{index}] ({devices[index]!r})" for index in range(workers, given))
        doubts.append(
            f"{given} devices for {counted(workers, 'worker')}: {idle} will be idle. Give as many devices as there are "
            "workers, or cut the layers into more partitions"
        )
    if torch_private.is_compiled(module):
        doubts.append(
            f"{type(module).__name__}.compile() was called before the pipe was made, which calls the layers one by one "
            "and never the module itself, so they are not compiled: compile each of them instead, "
            "for layer in module: layer.compile()"
        )
    return doubts
