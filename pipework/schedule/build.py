"""Schedules by name, as `Pipe(..., schedule="1f1b")` and the command line ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pipework.schedule.checks import positive_integer
from pipework.schedule.costs import Costs
from pipework.schedule.dualpipe_v import dualpipe_v
from pipework.schedule.eager_1f1b import eager_1f1b
from pipework.schedule.fill_drain import fill_drain
from pipework.schedule.forward_only import forward_only
from pipework.schedule.hanayo import hanayo
from pipework.schedule.interleaved import interleaved_1f1b
from pipework.schedule.interleaved_zb import interleaved_zb
from pipework.schedule.looped_bfs import looped_bfs
from pipework.schedule.one_forward_one_backward import one_forward_one_backward
from pipework.schedule.placement import loop_placement, wave_placement
from pipework.schedule.schedule import Schedule
from pipework.schedule.v_half import v_half
from pipework.schedule.v_min import v_min
from pipework.schedule.zb_h1 import zb_h1
from pipework.schedule.zb_h2 import zb_h2
from pipework.schedule.zb_v import zb_v


@dataclass(frozen=True)
class Recipe:
    """How a schedule is made.

    Attributes:
        generator: a function of the numbers of workers and of micro-batches, if `several` of stages per worker, and if
            `timed` of costs by keyword.
        several: whether the user may choose how many stages a worker holds.
        stages_per_worker: how many stages a worker has unless told otherwise; None: 2 if `several`, else 1.
        placement: from the numbers of workers and of stages per worker, the worker of each stage.
        timed: whether costs decide about the order.
    """

    generator: Callable[..., Schedule]
    several: bool = False
    stages_per_worker: int = 0
    placement: Callable[[int, int], tuple[int, ...]] = loop_placement
    timed: bool = False

    def __post_init__(self) -> None:
        if not self.stages_per_worker:
            object.__setattr__(self, "stages_per_worker", 2 if self.several else 1)
