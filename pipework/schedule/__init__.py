"""Schedules: what every worker does in which order, as data; checked, simulated and drawn. Needs no torch."""

from pipework.schedule.action import KINDS, OF_STAGES, TRANSFERS, Action
from pipework.schedule.analysis.bounds import Bounds, lower_bounds
from pipework.schedule.analysis.channels import Channel
from pipework.schedule.analysis.compare import Comparison, compare
from pipework.schedule.analysis.rules import Violation
from pipework.schedule.analysis.simulate import Simulation, simulate
from pipework.schedule.analysis.validate import Conditions, ScheduleError, Validation, check, validate
from pipework.schedule.costs import Costs
from pipework.schedule.draw.grid import grid
from pipework.schedule.draw.svg import svg
from pipework.schedule.generators.dualpipe_v import dualpipe_v
from pipework.schedule.generators.eager_1f1b import eager_1f1b
from pipework.schedule.generators.fill_drain import fill_drain
from pipework.schedule.generators.forward_only import forward_only
from pipework.schedule.generators.hanayo import hanayo
from pipework.schedule.generators.interleaved_1f1b import interleaved_1f1b
from pipework.schedule.generators.interleaved_zb import interleaved_zb
from pipework.schedule.generators.looped_bfs import looped_bfs
from pipework.schedule.generators.one_forward_one_backward import one_forward_one_backward
from pipework.schedule.generators.v_half import v_half
from pipework.schedule.generators.v_min import v_min
from pipework.schedule.generators.zb_h1 import zb_h1
from pipework.schedule.generators.zb_h2 import zb_h2
from pipework.schedule.generators.zb_v import zb_v
from pipework.schedule.list_schedule import list_schedule
from pipework.schedule.passes.communication import with_communication, with_gradient_reduction, with_skips
from pipework.schedule.passes.recompute import with_recompute
from pipework.schedule.passes.restrict import restricted
from pipework.schedule.phases import split_at_loss
from pipework.schedule.registry import SCHEDULES, ScheduleSpec, build, recipe
from pipework.schedule.schedule import Schedule
from pipework.schedule.timeline import Interval, Timeline

__all__ = [
    "KINDS",
    "OF_STAGES",
    "SCHEDULES",
    "TRANSFERS",
    "Action",
    "Bounds",
    "Channel",
    "Comparison",
    "Conditions",
    "Costs",
    "Interval",
    "ScheduleSpec",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Timeline",
    "Validation",
    "Violation",
    "build",
    "check",
    "compare",
    "dualpipe_v",
    "eager_1f1b",
    "fill_drain",
    "forward_only",
    "grid",
    "hanayo",
    "interleaved_1f1b",
    "interleaved_zb",
    "list_schedule",
    "looped_bfs",
    "lower_bounds",
    "one_forward_one_backward",
    "recipe",
    "restricted",
    "simulate",
    "split_at_loss",
    "svg",
    "v_half",
    "v_min",
    "validate",
    "with_communication",
    "with_gradient_reduction",
    "with_recompute",
    "with_skips",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
