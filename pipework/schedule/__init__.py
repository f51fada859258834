"""Schedules: the order of actions of each worker, as data, which can be checked, simulated and drawn without torch."""

from pipework.schedule.action import KINDS, OF_STAGES, TRANSFERS, Action
from pipework.schedule.analysis.bounds import Bounds, lower_bounds
from pipework.schedule.analysis.channels import Channel
from pipework.schedule.analysis.compare import Comparison, compare
from pipework.schedule.analysis.rules import Violation
from pipework.schedule.analysis.simulate import Measures, Simulation, measure, simulate
from pipework.schedule.analysis.validate import ScheduleError, Validation, ValidationOptions, check, validate
from pipework.schedule.costs import Costs, StageCosts
from pipework.schedule.draw.grid import grid
from pipework.schedule.draw.svg import svg
from pipework.schedule.formats import from_csv, from_json, to_csv, to_json
from pipework.schedule.generators.controllable_memory import v_half, v_min
from pipework.schedule.generators.dualpipe_v import dualpipe_v
from pipework.schedule.generators.fill_drain import fill_drain, forward_only, looped_bfs
from pipework.schedule.generators.hanayo import hanayo
from pipework.schedule.generators.one_forward_one_backward import (
    eager_1f1b,
    interleaved_1f1b,
    one_forward_one_backward,
)
from pipework.schedule.generators.zero_bubble import interleaved_zb, zb_h1, zb_h2, zb_v
from pipework.schedule.list_schedule import list_schedule
from pipework.schedule.passes.communication import with_communication, with_gradient_reduction, with_skips
from pipework.schedule.passes.recompute import (
    spread_evenly,
    with_recompute,
    with_recompute_on_stages,
    without_recompute,
)
from pipework.schedule.passes.sharding import with_sharding
from pipework.schedule.placement import loop_placement, wave_placement
from pipework.schedule.registry import SCHEDULES, ScheduleSpec, build, schedule_spec
from pipework.schedule.schedule import Schedule, restricted, split_at_loss
from pipework.schedule.timeline import Interval, Timeline

__all__ = [
    "Action",
    "Bounds",
    "Channel",
    "Comparison",
    "Costs",
    "Interval",
    "KINDS",
    "Measures",
    "OF_STAGES",
    "SCHEDULES",
    "Schedule",
    "ScheduleError",
    "ScheduleSpec",
    "Simulation",
    "StageCosts",
    "TRANSFERS",
    "Timeline",
    "Validation",
    "ValidationOptions",
    "Violation",
    "build",
    "check",
    "compare",
    "dualpipe_v",
    "eager_1f1b",
    "fill_drain",
    "forward_only",
    "from_csv",
    "from_json",
    "grid",
    "hanayo",
    "interleaved_1f1b",
    "interleaved_zb",
    "list_schedule",
    "loop_placement",
    "looped_bfs",
    "lower_bounds",
    "measure",
    "one_forward_one_backward",
    "restricted",
    "schedule_spec",
    "simulate",
    "split_at_loss",
    "spread_evenly",
    "svg",
    "to_csv",
    "to_json",
    "v_half",
    "v_min",
    "validate",
    "wave_placement",
    "with_communication",
    "with_gradient_reduction",
    "with_recompute",
    "with_recompute_on_stages",
    "with_sharding",
    "with_skips",
    "without_recompute",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
