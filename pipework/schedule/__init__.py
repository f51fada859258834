"""Schedules: what every worker does in which order, as data; checked, simulated and drawn. Needs no torch."""

from pipework.schedule.action import KINDS, Action
from pipework.schedule.build import SCHEDULES, Recipe, build, recipe
from pipework.schedule.costs import Costs
from pipework.schedule.fill_drain import fill_drain
from pipework.schedule.grid import grid
from pipework.schedule.interleaved import interleaved_1f1b
from pipework.schedule.looped_bfs import looped_bfs
from pipework.schedule.one_forward_one_backward import one_forward_one_backward
from pipework.schedule.phases import split_at_loss
from pipework.schedule.recompute import with_recompute
from pipework.schedule.restrict import restricted
from pipework.schedule.schedule import Schedule
from pipework.schedule.simulate import Simulation, simulate
from pipework.schedule.svg import svg
from pipework.schedule.timeline import Interval, Timeline
from pipework.schedule.validate import ScheduleError, Validation, Violation, check, validate

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Action",
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
    "fill_drain",
    "grid",
    "interleaved_1f1b",
    "looped_bfs",
    "one_forward_one_backward",
    "recipe",
    "restricted",
    "simulate",
    "split_at_loss",
    "svg",
    "validate",
    "with_recompute",
]
