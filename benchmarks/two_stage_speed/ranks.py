"""The candidates of `two_stage_speed` with two processes, and the part of one process in each."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.two_processes import PYTORCH, Part, PipeworkPart, PyTorchPart
from benchmarks.two_stage_speed.task import Task
from pipework import Mesh

PIPELINING = "torch.distributed.pipelining"
NAMES = {f"pipework {schedule}, two processes": schedule for schedule in PYTORCH}  # what can be compared
RIVALS = {f"{PIPELINING} {schedule}": schedule for schedule in PYTORCH}


def parts(task: Task, mesh: Mesh) -> Mapping[str, Part]:
    """The parts of one process."""
    pipes: dict[str, Part] = {name: PipeworkPart(mesh, task, schedule) for name, schedule in NAMES.items()}
    return {**pipes, **{name: PyTorchPart(mesh.worker, task, schedule) for name, schedule in RIVALS.items()}}
