"""The schedules of torch.distributed.pipelining, as CSV: made by its own classes, without a process group."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.pipelining import schedules as peer

SEVERAL = (
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
"""Those with several stages per rank, whose transfers PyTorch puts among the actions."""


class Stage:
    """As much of a stage as PyTorch's schedules ask for."""

    def __init__(self, index: int, ranks: int, stages: int, rank: int) -> None:
        self.stage_index, self.group_size, self.num_stages, self.group_rank = index, ranks, stages, rank
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.group, self.has_backward, self.submod = None, True, torch.nn.Identity()


def loss_fn(output: Any, target: Any) -> Any:
    return output


def made(kind: str, workers: int, chunks: int) -> tuple[Any, dict[int, list[Any]]]:
    """PyTorch's schedule of a class, for rank 0, and the orders of all ranks, in which None is an idle step."""
    several = kind in SEVERAL
    stages = workers * (2 if several else 1)
    if not several:
        schedule = getattr(peer, kind)(Stage(0, workers, stages, 0), chunks, loss_fn=loss_fn)
        return schedule, schedule._get_pipeline_order()
    wave = kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    own = [Stage(index, workers, stages, 0) for index in ((0, stages - 1) if wave else (0, workers))]
    schedule = getattr(peer, kind)(own, chunks, loss_fn=loss_fn)
    return schedule, schedule.pipeline_order


def compute_only(kind: str, workers: int, chunks: int) -> str:
    """The orders as CSV, without transfers."""
    _, orders = made(kind, workers, chunks)
    return "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in orders.values())


def compute_comms(kind: str, workers: int, chunks: int) -> str:
    """The orders as CSV, with transfers where PyTorch's runtime posts them."""
    schedule, _ = made(kind, workers, chunks)
    with TemporaryDirectory() as folder:
        file = Path(folder, "theirs.csv")
        schedule._dump_csv(str(file), format="compute_comms")
        return file.read_text(encoding="utf-8")
