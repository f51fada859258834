"""Schedules: what every worker does in which order, as data; checked, simulated and drawn. Needs no torch."""

from pipework.schedule.action import KINDS, OF_STAGES, TRANSFERS, Action
from pipework.schedule.bounds import Bounds, lower_bounds
from pipework.schedule.build import SCHEDULES, Recipe, build, recipe
from pipework.schedule.channels import Channel
from pipework.schedule.communication import with_communication, with_gradient_reduction, with_skips
from pipework.schedule.compare import Comparison, compare
from pipework.schedule.costs import Costs
from pipework.schedule.dualpipe_v import dualpipe_v
from pipework.schedule.eager_1f1b import eager_1f1b
from pipework.schedule.fill_drain import fill_drain
from pipework.schedule.forward_only import forward_only
from pipework.schedule.grid import grid
from pipework.schedule.hanayo import hanayo
from pipework.schedule.interleaved import interleaved_1f1b
from pipework.schedule.interleaved_zb import interleaved_zb
from pipework.schedule.list_schedule import list_schedule
from pipework.schedule.looped_bfs import looped_bfs
from pipework.schedule.one_forward_one_backward import one_forward_one_backward
from pipework.schedule.phases import split_at_loss
from pipework.schedule.recompute import with_recompute
from pipework.schedule.restrict import restricted
from pipework.schedule.rules import Violation
from pipework.schedule.schedule import Schedule
from pipework.schedule.simulate import Simulation, simulate
from pipework.schedule.svg import svg
from pipework.schedule.timeline import Interval, Timeline
from pipework.schedule.v_half import v_half
from pipework.schedule.v_min import v_min
from pipework.schedule.validate import Conditions, ScheduleError, Validation, check, validate
from pipework.schedule.zb_h1 import zb_h1
from pipework.schedule.zb_h2 import zb_h2
from pipework.schedule.zb_v import zb_v

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
    "Recipe",
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
